"""Mail between workers that may end at any time: nothing waits for a peer that is gone.

Where `Channels` fail as a whole when a peer dies, mail goes on among the rest: a peer that is gone takes no
more messages and sends none. Workers of one host use shared memory, others a TCP connection each.
"""

from __future__ import annotations

import os
import select
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from plait.cluster.channels import PeerError
from plait.cluster.messages import Message
from plait.cluster.shared import Door, SharedLink, knock
from plait.cluster.wire import Gate, WireLink, ring

Link = SharedLink | WireLink
WINDOW = 8


class Mail:
    """This worker's mail with its peers; one thread at a time uses it.

    A channel is a number that both ends use for one stream of messages.
    """

    def __init__(self, rank: int, links: dict[int, Link]) -> None:
        self.rank = rank
        self._links = links
        self.bytes_sent = 0

    def send(
        self, peer: int, channel: int, number: int, tensors: Sequence[Tensor | None], note: str = ""
    ) -> bool:
        """Start a message on its way, without waiting; False where the peer is gone or takes none.

        A peer that has not taken `WINDOW` earlier messages of the channel is stopped or far behind.
        """
        link = self._links[peer]
        if self.is_gone(peer):
            return False
        if link.under_way(channel) >= WINDOW:
            link.take_notices()
            if link.under_way(channel) >= WINDOW:
                return False
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
        """Return when some peer has told something, or is gone, or after `seconds`; have all of it read."""
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


def open_mail(
    store: dist.Store, prefix: str, rank: int, hosts: Sequence[str], address: str, deadline_s: float
) -> Mail:
    """Mail with all other ranks; all of them call it with the same `prefix`, which serves once.

    `hosts` names the host of each rank; `address` is where other hosts reach this one.
    """
    end = time.monotonic() + deadline_s
    can_share = hasattr(os, "memfd_create")
    near = {r for r, host in enumerate(hosts) if can_share and host == hosts[rank] and r != rank}
    door = Door(f"plait-{uuid.uuid4().hex}") if can_share else None
    gate = Gate(address)
    store.set(f"{prefix}/door/{rank}", f"{door.name if door else ''} {gate.address} {gate.port}")
    links: dict[int, Link] = {}
    try:
        for peer in range(rank):
            left = timedelta(seconds=max(0.1, end - time.monotonic()))
            store.wait([f"{prefix}/door/{peer}"], left)
            name, place, port = store.get(f"{prefix}/door/{peer}").decode().split(" ")
            seconds = end - time.monotonic()
            if peer in near:
                links[peer] = SharedLink(knock(name, rank, seconds))
            else:
                links[peer] = WireLink(ring(place, int(port), rank, seconds))
        for higher in range(rank + 1, len(hosts)):
            if higher in near and door is not None:
                peer, connection = door.accept(end)
                links[peer] = SharedLink(connection)
            else:
                peer, connection = gate.accept(end)
                links[peer] = WireLink(connection)
    except (TimeoutError, RuntimeError) as failure:
        missing = sorted(set(range(len(hosts))) - {rank} - links.keys())
        raise PeerError(f"worker {rank}: no word from workers {missing} while linking: {failure}") from None
    finally:
        gate.close()
        if door is not None:
            door.close()
    return Mail(rank, links)
