"""Channels: tagged, ordered, non-blocking messages of tensors between workers.

Workers on one host use shared memory. Others use TCP, as do all workers if the system has no anonymous shared
memory; GPUs on different hosts use NCCL. Tensors of any dtype and device can be sent. They arrive on
the CPU; on the sender's GPU if this worker can read its memory; or, by NCCL, on this worker's GPU. Every wait
has a deadline, and its error names the peer and what was waited for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.collectives import all_gather_values
from plait.comm.links.cuda_ipc import name_of
from plait.comm.links.nccl import GpuReach, NcclLink, make_nccl_pairs
from plait.comm.links.packing import Content, Message, OnSent
from plait.comm.links.polling import Link, wait_for_notices
from plait.comm.links.shm import SharedLink
from plait.comm.links.tcp import TcpLink
from plait.comm.rendezvous import CHECK_S, Rendezvous
from plait.core.codec import decode, encode
from plait.core.errors import LostPeer, PeerError, PlaitError


@dataclass(eq=False)
class Channels:
    """This worker's channels to its peers.

    A channel is a number that both ends use for one stream of messages. Each message has a number (its
    microbatch), increasing on each channel. At most `window` messages of a channel are in flight. `check` is
    called periodically while this worker waits; an exception from it ends the wait.
    """

    rank: int
    links: Mapping[int, Link]
    deadline_s: float
    window: int
    check: Callable[[], None] | None = None

    def send(
        self,
        peer: int,
        channel: int,
        number: int,
        tensors: Sequence[Tensor | None],
        what: str,
        note: str = "",
        on_sent: OnSent | None = None,
    ) -> int:
        """Send a message; `what` describes it in errors. The tensors may be changed after the call.

        Returns its bytes. `on_sent` is called once it has left, which over TCP may be after the call.
        """
        link = self.links[peer]
        end = time.monotonic() + self.deadline_s
        while link.under_way[channel] >= self.window:
            self._wait(peer, end, f"to take {what}")
        return link.send(channel, Content(number, tensors, note), on_sent)

    def receive(self, peer: int, channel: int, number: int, what: str) -> Message:
        """Wait for message `number` of the channel; `what` describes it in errors."""
        link = self.links[peer]
        end = time.monotonic() + self.deadline_s
        while (message := link.take(channel)) is None:
            self._wait(peer, end, f"for {what}")
        if message.content.number != number:
            raise PlaitError(
                f"worker {self.rank} waited for {what}, number {number}, but worker {peer} sent number "
                f"{message.content.number}; the workers run different schedules"
            )
        return message

    @property
    def seen_gpu_bytes(self) -> int:
        """The size of the peers' GPU memory that this worker has opened to read messages."""
        return sum(link.seen_gpu_bytes for link in self.links.values() if isinstance(link, SharedLink))

    def close(self) -> None:
        """Close all channels; peers that wait for no message are not affected."""
        for link in self.links.values():
            link.close()

    def _wait(self, peer: int, end: float, what: str) -> None:
        """Wait for a notice from any peer; if another peer than `peer` has died, the error names that one."""
        gone = [p for p, link in self.links.items() if link.lost]
        if gone:
            raise PeerError(
                f"worker {gone[0]} is gone while worker {self.rank} waited {what} (worker {peer}); look at "
                f"the log of worker {gone[0]}",
                LostPeer.GONE,
                gone[0],
            )
        if self.links[peer].ended:
            raise PeerError(
                f"worker {self.rank} waited {what}, but worker {peer} has ended", LostPeer.GONE, peer
            )
        if time.monotonic() >= end:
            raise PeerError(
                f"worker {self.rank} waited {self.deadline_s:g} s for worker {peer} {what}; it hangs, or "
                f"is slower than parallel.timeout_s allows",
                LostPeer.SILENT,
                peer,
            )
        for link in self.links.values():
            if isinstance(link, SharedLink):
                link.give_back(wait=True)
        left = end - time.monotonic()
        if self.check is not None:
            self.check()
            left = min(left, CHECK_S)
        wait_for_notices(self.links.values(), left)


def connect(
    rendezvous: Rendezvous,
    peers: Iterable[int],
    *,
    deadline_s: float | None = None,
    window: int = 64,
    device: torch.device | None = None,
) -> Channels:
    """Channels to `peers`; all ranks of the default process group call it together.

    `device` is this worker's. `deadline_s` limits each wait (default: the rendezvous's timeout). If a worker
    is in the `peers` of another, the reverse must hold too.
    """
    rank, hosts = rendezvous.rank, rendezvous.hosts
    deadline_s = rendezvous.timeout_s if deadline_s is None else deadline_s
    peers = sorted(set(peers) - {rank})
    connections = rendezvous.connect("channels", peers)
    gpu = device if device is not None and device.type == "cuda" else None
    gathered = all_gather_values(encode(None if gpu is None else GpuReach.of(gpu, peers)))
    reach = {each: decode(GpuReach, known) for each, known in enumerate(gathered) if known is not None}
    pairs = make_nccl_pairs(rank, hosts, reach, deadline_s, gpu)
    links: dict[int, Link] = {}
    for peer, connection in connections.items():
        other = reach.get(peer)
        if connection.family == socket.AF_UNIX:
            can_read = gpu is not None and other is not None and name_of(gpu) in other.readable
            links[peer] = SharedLink(connection, gpu if can_read else None)
        else:
            links[peer] = NcclLink(connection, pairs[peer]) if peer in pairs else TcpLink(connection)
    return Channels(rank, links, deadline_s, window, rendezvous.check)
