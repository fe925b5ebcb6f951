"""Messages between workers that may end at any time: nothing waits for a peer that is gone.

Where `Channels` fail as a whole when a peer dies, a mailbox goes on with the rest: a peer that is gone takes
no more messages and sends none. Workers of one host use shared memory, others a TCP connection each.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from plait.comm.links.packing import Message
from plait.comm.links.shm import SharedLink
from plait.comm.links.tcp import WireLink
from plait.comm.rendezvous import Rendezvous

Link = SharedLink | WireLink
OnSend = Callable[[int, int], None]
WINDOW = 8


class Mailbox:
    """This worker's messages to and from its peers; one thread at a time uses it.

    A channel is a number that both ends use for one stream of messages. Before each message `on_send` is
    called with its peer and channel: whatever is to happen to a worker that sends it can happen there.
    """

    def __init__(self, rank: int, links: dict[int, Link], on_send: OnSend | None = None) -> None:
        self.rank = rank
        self._links = links
        self._on_send = on_send
        self.bytes_sent = 0

    def send(
        self, peer: int, channel: int, number: int, tensors: Sequence[Tensor | None], note: str = ""
    ) -> bool:
        """Start a message on its way, without waiting; False where the peer is gone or takes none.

        A peer that has not taken `WINDOW` earlier messages of the channel is stopped or much behind.
        """
        link = self._links[peer]
        if self.is_gone(peer):
            return False
        if link.under_way(channel) >= WINDOW:
            link.take_notices()
            if link.under_way(channel) >= WINDOW:
                return False
        if self._on_send is not None:
            self._on_send(peer, channel)
        link.send(channel, number, tensors, note)
        self.bytes_sent += sum(t.numel() * t.element_size() for t in tensors if t is not None)
        return True

    def take(self, peer: int, channel: int) -> Message | None:
        """The next message of the channel, if one has arrived."""
        return self._links[peer].take(channel)

    def peers(self) -> list[int]:
        return list(self._links)

    def is_gone(self, peer: int) -> bool:
        """Whether the peer has ended, on purpose or not; what it sent before can still be taken."""
        link = self._links[peer]
        return link.lost or link.ended

    def wait(self, seconds: float) -> None:
        """Read all that has come; returns once a peer has sent something or is gone, or after `seconds`."""
        poll = select.poll()
        open_links = {link.fileno(): link for link in self._links.values() if not (link.lost or link.ended)}
        for descriptor, link in open_links.items():
            unsent = isinstance(link, WireLink) and link.unsent
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if unsent else 0))
        if not open_links:
            time.sleep(max(0.0, seconds))
            return
        for descriptor, _ in poll.poll(max(0.0, seconds) * 1e3):
            open_links[descriptor].take_notices()

    def flush(self, seconds: float) -> None:
        """Have what was sent leave this process, waiting `seconds` at most."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(
            isinstance(link, WireLink) and link.unsent and not link.lost for link in self._links.values()
        ):
            self.wait(end - time.monotonic())

    def close(self) -> None:
        """End it; peers see that it was on purpose."""
        self.flush(1.0)
        for link in self._links.values():
            link.close()


def open_mailbox(
    rendezvous: Rendezvous,
    name: str,
    own: int | None = None,
    hosts: Sequence[str] | None = None,
    on_send: OnSend | None = None,
) -> Mailbox:
    """A mailbox linked with all other ranks; all of them call it with the same `name`.

    Where members have other numbers than their ranks, `own` is this worker's and `hosts` names the host of
    each. `on_send` is called before each message.
    """
    own = rendezvous.rank if own is None else own
    hosts = rendezvous.hosts if hosts is None else hosts
    met = rendezvous.connect(name, range(len(hosts)), own, hosts)
    return Mailbox(own, {peer: _link(connection) for peer, connection in met.items()}, on_send)


def _link(connection: socket.socket) -> Link:
    return SharedLink(connection) if connection.family == socket.AF_UNIX else WireLink(connection)
