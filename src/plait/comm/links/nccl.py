"""Messages between GPUs of two hosts: tensors over NCCL, their headers over TCP.

NCCL has no tags, and an operation blocks its stream until the other end has posted its part. So a receive is
posted only after the header of its message says that the send was, and all in the order of the sends,
whichever channel asks. This thread waits only for headers, with a deadline; the GPU waits for tensors.
Messages without a GPU tensor use TCP only.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.links.cuda_ipc import GpuMemory, name_of, reachable_from
from plait.comm.links.packing import Buffer, Content, Message, OnSent, packing_of
from plait.comm.links.tcp import CLOSE_S, HEADER, TcpLink


@dataclass(frozen=True)
class NcclPair:
    """A peer with a GPU on another host, this worker's GPU, and the groups of the two for each direction."""

    peer: int
    device: torch.device
    there: dist.ProcessGroup
    back: dist.ProcessGroup


class NcclLink(TcpLink):
    """One end of the connection to a worker with a GPU on another host."""

    def __init__(self, connection: socket.socket, pair: NcclPair) -> None:
        super().__init__(connection)
        self._pair = pair
        # Operations in progress, with their buffers.
        self._sending: deque[tuple[dist.Work, Buffer]] = deque()
        self._receiving: dict[Buffer, dist.Work] = {}

    def send(self, channel: int, content: Content, on_sent: OnSent | None = None) -> int:
        """Start sending a message; never blocks. Returns its bytes. It counts as sent once its header is."""
        if not content.is_on_gpu:
            return super().send(channel, content, on_sent)
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()[0].wait()
        packing = packing_of(content)
        buffer = self._buffer(torch.empty(packing.head_size, dtype=torch.uint8), packing.size)
        buffer.write(content, packing)
        work = self._post(dist.isend, buffer, self._pair.there)
        if work is not None:
            self._sending.append((work, buffer))
        self.under_way[channel] += 1
        self._put(HEADER, channel, buffer.flat, on_sent)
        return packing.size

    def take(self, channel: int) -> Message | None:
        """The next message of `channel`, if its header has arrived.

        Later work on the current stream waits for its tensors.
        """
        if self._arrived[channel]:
            work = self._receiving.pop(self._arrived[channel][0], None)
            if work is not None:
                work.wait()
        return super().take(channel)

    def close(self, seconds: float = CLOSE_S) -> None:
        """Wait for all operations in progress, and close this end."""
        if not self.lost:
            for work in (*(work for work, _ in self._sending), *self._receiving.values()):
                work.wait(timedelta(seconds=seconds))
        super().close(seconds)

    def _handle(self, kind: int, channel: int, body: Tensor | None) -> None:
        super()._handle(kind, channel, body)
        if kind == HEADER:
            assert body is not None
            buffer = self._buffer(body, Buffer(body).message_size)
            self._arrived[channel].append(buffer)
            work = self._post(dist.irecv, buffer, self._pair.back)
            if work is not None:
                self._receiving[buffer] = work

    def _buffer(self, head: Tensor, size: int) -> Buffer:
        """New memory for a message, from torch's caching allocator."""
        memory = torch.empty(size, dtype=torch.uint8, device=self._pair.device)
        return Buffer(head, GpuMemory(memory, torch.cuda.Event()))

    def _post(self, operation: Any, buffer: Buffer, group: dist.ProcessGroup) -> dist.Work | None:
        """Start sending or receiving the tensors of a message; None if they are all empty."""
        assert buffer.gpu is not None
        content = buffer.gpu.flat[buffer.capacity :]
        if not content.numel():
            return None
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, content, self._pair.peer, group)])
        return work


@dataclass(frozen=True)
class GpuReach:
    """What a worker with a GPU reports to the others.

    Its GPU's identity for NCCL, the peers that NCCL might reach, and the GPUs whose memory it can read.
    """

    gpu: str
    peers: tuple[int, ...]
    readable: tuple[str, ...]

    @staticmethod
    def of(gpu: torch.device, peers: Sequence[int]) -> GpuReach:
        by_nccl = tuple(peers) if dist.is_nccl_available() else ()
        return GpuReach(nccl_name_of(gpu), by_nccl, reachable_from(gpu))


def nccl_name_of(gpu: torch.device) -> str:
    """The identity of a GPU for NCCL, which rejects two workers on one, unless they claim different hosts."""
    return f"{name_of(gpu)} {os.environ.get('NCCL_HOSTID', '')}"


def make_nccl_pairs(
    rank: int,
    hosts: Sequence[str],
    reach: Mapping[int, GpuReach],
    deadline_s: float,
    device: torch.device | None,
) -> dict[int, NcclPair]:
    """The peers of this worker with a GPU on another host; all ranks call it together.

    `reach` has an entry for every worker with a GPU; `device` is this worker's.
    """
    pairs = {}
    deadline = timedelta(seconds=deadline_s)
    for first, second in _remote_pairs(hosts, reach):
        member = rank in (first, second)
        # One group per direction, as in a common one a send would wait for an earlier receive.
        up, down = (
            dist.new_group([first, second], deadline, "nccl", device_id=device if member else None)
            for _ in range(2)
        )
        if member:
            assert device is not None
            peer, there, back = (second, up, down) if rank == first else (first, down, up)
            pairs[peer] = NcclPair(peer, device, there, back)
            for group, sends in ((up, rank == first), (down, rank == second)):
                _connect_group(peer, group, sends, device, deadline)
    return pairs


def _connect_group(
    peer: int, group: dist.ProcessGroup, sends: bool, device: torch.device, deadline: timedelta
) -> None:
    """Connect both ends of a group by a first message, as NCCL connects lazily."""
    operation = dist.isend if sends else dist.irecv
    nothing = torch.zeros(1, device=device)
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, nothing, peer, group)])
    work.wait(deadline)


def _remote_pairs(hosts: Sequence[str], reach: Mapping[int, GpuReach]) -> list[tuple[int, int]]:
    """Pairs of peers with different GPUs on different hosts, in the same order on all ranks."""
    known = [(a, b) for a in reach for b in reach if a < b and hosts[a] != hosts[b]]
    apart = [(a, b) for a, b in known if reach[a].gpu != reach[b].gpu]
    return sorted((a, b) for a, b in apart if b in reach[a].peers and a in reach[b].peers)
