"""Messages between workers that may end at any time: nothing waits for a peer that is gone.

While `Channels` fail as a whole when a peer dies, a mailbox still serves the other peers; messages to a peer
that is gone are dropped. Workers of one host use shared memory, others TCP connections.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from torch import Tensor

from plait.comm.links.packing import Content, Message
from plait.comm.links.polling import Link, wait_for_notices
from plait.comm.links.shm import SharedLink
from plait.comm.links.tcp import TcpLink
from plait.comm.rendezvous import Rendezvous

OnSend = Callable[[int, int], None]
WINDOW = 8


class Mailbox:
    """This worker's messages to and from its peers; used by one thread at a time.

    A channel is a number that both ends use for one stream of messages. `on_send` is called with the peer and
    the channel before each message; tests inject faults there.
    """

    def __init__(self, rank: int, links: dict[int, Link], on_send: OnSend | None = None) -> None:
        self.rank = rank
        self._links = links
        self._on_send = on_send
        self.bytes_sent = 0

    def send(
        self, peer: int, channel: int, number: int, tensors: Sequence[Tensor | None], note: str = ""
    ) -> bool:
        """Send a message without blocking; False if the peer is gone or its window is full.

        The window is full if the peer has not taken `WINDOW` earlier messages of the channel.
        """
        link = self._links[peer]
        if self.is_gone(peer):
            return False
        if link.under_way[channel] >= WINDOW:
            link.take_notices()
            if link.under_way[channel] >= WINDOW:
                return False
        if self._on_send is not None:
            self._on_send(peer, channel)
        link.send(channel, Content(number, tensors, note))
        self.bytes_sent += sum(t.numel() * t.element_size() for t in tensors if t is not None)
        return True

    def take(self, peer: int, channel: int) -> Message | None:
        """The next message of the channel, if one has arrived."""
        return self._links[peer].take(channel)

    def peers(self) -> list[int]:
        return list(self._links)

    def is_gone(self, peer: int) -> bool:
        """Whether the peer has closed its mailbox or died; messages it sent before can still be taken."""
        link = self._links[peer]
        return link.lost or link.ended

    def wait(self, seconds: float) -> None:
        """Receive messages; returns once a peer has sent something or is gone, or after `seconds`."""
        wait_for_notices(self._links.values(), seconds)

    def close(self) -> None:
        """Close all links; peers can tell this from a crash."""
        for link in self._links.values():
            link.close()


def open_mailbox(
    rendezvous: Rendezvous,
    name: str,
    index: int | None = None,
    hosts: Sequence[str] | None = None,
    on_send: OnSend | None = None,
) -> Mailbox:
    """A mailbox connected with all other ranks; all of them call it with the same `name`.

    If members have other numbers than their ranks, `index` is this worker's and `hosts` has the host of each
    member. `on_send` is called before each message.
    """
    index = rendezvous.rank if index is None else index
    hosts = rendezvous.hosts if hosts is None else hosts
    connections = rendezvous.connect(name, range(len(hosts)), index, hosts)
    return Mailbox(index, {peer: _link(connection) for peer, connection in connections.items()}, on_send)


def _link(connection: socket.socket) -> Link:
    return SharedLink(connection) if connection.family == socket.AF_UNIX else TcpLink(connection)
