"""Channels: tagged, ordered, non-blocking messages of tensors between workers.

Workers on one host use shared memory. Others use gloo, as do all workers if the system has no anonymous
shared memory; GPUs on different hosts use NCCL. Tensors of any dtype and device can be sent. They arrive on
the CPU; on the sender's GPU if this worker can read its memory; or, by NCCL, on this worker's GPU. Every wait
has a deadline, and its error names the peer and what was waited for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from plait.comm.collectives import all_gather_values
from plait.comm.links.cuda_ipc import name_of, reachable_from
from plait.comm.links.gloo import RemoteLink
from plait.comm.links.nccl import NcclLink, NcclPeers, make_nccl_links
from plait.comm.links.packing import Message
from plait.comm.links.shm import SharedLink, wait_for_notices
from plait.comm.rendezvous import CHECK_S, Rendezvous, sharing_memory
from plait.core.codec import decode, encode
from plait.core.errors import LostPeer, PeerError, PlaitError

CrossHostLink = RemoteLink | NcclLink
Link = SharedLink | CrossHostLink


class Channels:
    """This worker's channels to its peers.

    A channel is a number that both ends use for one stream of messages. Each message has a number (its
    microbatch), increasing on each channel. At most `window` messages of a channel are in flight. `check` is
    called periodically while this worker waits; an exception from it ends the wait.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Link],
        deadline_s: float,
        window: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._rank = rank
        self._check = check
        self._links = dict(links)
        self._shared = [link for link in links.values() if isinstance(link, SharedLink)]
        self._deadline_s = deadline_s
        self._window = window

    def buffer_count(self, peer: int) -> int:
        """The number of buffers for messages to and from `peer`, used or free."""
        return self._links[peer].buffer_count

    def send(
        self,
        peer: int,
        channel: int,
        number: int,
        tensors: Sequence[Tensor | None],
        what: str,
        note: str = "",
    ) -> None:
        """Send a message; `what` describes it in errors. The tensors may be changed after the call."""
        link = self._links[peer]
        end = time.monotonic() + self._deadline_s
        if isinstance(link, CrossHostLink):
            try:
                link.send(channel, number, tensors, note, self._deadline_s)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as failure:
                raise self._failed(peer, f"to send {what} to it", failure, end) from failure
            return
        while link.under_way(channel) >= self._window:
            self._wait(peer, end, f"to take {what}")
        link.send(channel, number, tensors, note)

    def receive(self, peer: int, channel: int, number: int, what: str) -> Message:
        """Wait for message `number` of the channel; `what` describes it in errors."""
        link = self._links[peer]
        end = time.monotonic() + self._deadline_s
        if isinstance(link, CrossHostLink):
            try:
                message = link.receive(channel, self._deadline_s)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as failure:
                raise self._failed(peer, f"for {what}", failure, end) from failure
        else:
            message = self._receive_shared(peer, link, channel, what)
        if message.content.number != number:
            raise PlaitError(
                f"worker {self._rank} waited for {what}, number {number}, but worker {peer} sent number "
                f"{message.content.number}; the workers run different schedules"
            )
        return message

    def expect(self, peer: int, channel: int) -> None:
        """Post a receive in advance, if the transport supports it."""
        link = self._links[peer]
        if isinstance(link, CrossHostLink):
            link.expect(channel)

    @property
    def seen_gpu_bytes(self) -> int:
        """The size of the peers' GPU memory that this worker has opened to read messages."""
        return sum(link.seen_gpu_bytes for link in self._shared)

    def close(self) -> None:
        """Close all channels; peers that wait for no message are not affected."""
        for link in self._links.values():
            if isinstance(link, SharedLink):
                link.close()
        for peer, link in self._links.items():
            if isinstance(link, CrossHostLink):
                end = time.monotonic() + self._deadline_s
                try:
                    link.close(self._deadline_s)
                except RuntimeError as failure:
                    raise self._failed(peer, "to close the connection", failure, end) from failure

    def _receive_shared(self, peer: int, link: SharedLink, channel: int, what: str) -> Message:
        message = link.take(channel)
        end = time.monotonic() + self._deadline_s
        while message is None:
            self._wait(peer, end, f"for {what}")
            message = link.take(channel)
        return message

    def _wait(self, peer: int, end: float, what: str) -> None:
        """Wait for a notice from any peer; if another peer than `peer` has died, the error names that one."""
        gone = [p for p, link in self._links.items() if isinstance(link, SharedLink) and link.lost]
        link = self._links[peer]
        assert isinstance(link, SharedLink)
        if gone:
            raise PeerError(
                f"worker {gone[0]} is gone while worker {self._rank} waited {what} (worker {peer}); look at "
                f"the log of worker {gone[0]}",
                LostPeer.GONE,
                gone[0],
            )
        if link.ended:
            raise PeerError(
                f"worker {self._rank} waited {what}, but worker {peer} has ended", LostPeer.GONE, peer
            )
        if time.monotonic() >= end:
            self._say_silent(peer, what)
        for each in self._shared:
            each.give_back(wait=True)
        left = end - time.monotonic()
        if self._check is not None:
            self._check()
            left = min(left, CHECK_S)
        wait_for_notices(self._shared, left)

    def _say_silent(self, peer: int, what: str) -> NoReturn:
        raise PeerError(
            f"worker {self._rank} waited {self._deadline_s:g} s for worker {peer} {what}; it hangs, or is "
            f"slower than parallel.timeout_s allows",
            LostPeer.SILENT,
            peer,
        )

    def _failed(self, peer: int, what: str, failure: Exception, end: float) -> PeerError:
        if time.monotonic() < end:
            return PeerError(
                f"worker {peer} is gone while worker {self._rank} waited {what}; look at the log of worker "
                f"{peer} ({failure})",
                LostPeer.GONE,
                peer,
            )
        return PeerError(
            f"worker {self._rank} waited {self._deadline_s:g} s for worker {peer} {what}: {failure}",
            LostPeer.SILENT,
            peer,
        )


@dataclass(frozen=True)
class _Reach:
    """What a worker with a GPU reports to the others: peers it can reach by NCCL, and GPUs it can read."""

    by_nccl: NcclPeers
    readable: tuple[str, ...]


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
    local = connect_local(rendezvous, "channels", peers)
    gpu = device if device is not None and device.type == "cuda" else None
    local_reach = _Reach(NcclPeers.of(gpu, peers), reachable_from(gpu)) if gpu else None
    gathered = all_gather_values(encode(local_reach))
    reach = [decode(_Reach, each) if each is not None else None for each in gathered]
    links: dict[int, Link] = {p: RemoteLink(p, window) for p in peers if p not in local}
    by_nccl = {each: known.by_nccl for each, known in enumerate(reach) if known is not None}
    links |= make_nccl_links(rank, hosts, by_nccl, window, deadline_s, gpu)
    for peer, connection in local.items():
        other = reach[peer]
        can_read = gpu is not None and other is not None and name_of(gpu) in other.readable
        links[peer] = SharedLink(connection, gpu if can_read else None)
    return Channels(rank, links, deadline_s, window, rendezvous.check)


def connect_local(rendezvous: Rendezvous, name: str, peers: Iterable[int]) -> dict[int, socket.socket]:
    """Connections to those of `peers` that share memory with this worker: those on its host.

    All of them call it with the same name. Without anonymous shared memory there are none.
    """
    return rendezvous.connect(name, sharing_memory(peers, rendezvous.rank, rendezvous.hosts))
