"""Messages between GPUs of two hosts: tensors over NCCL, their headers over gloo.

NCCL has no tags, and an operation blocks its stream until the other end has posted its part. So a receive is
posted only after the header of its message says that the send was, and all in the order of the sends,
whichever channel asks. This thread waits only for headers, with a deadline; the GPU waits for tensors.
Messages without a GPU tensor use gloo only.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.links.cuda_ipc import GpuMemory, name_of
from plait.comm.links.gloo import RemoteLink
from plait.comm.links.packing import Buffer, Message, packing_of

_HEADS = 0
# Headers are small; the messages in flight are limited by channel.
_MOST_HEADS = 4096


class NcclLink:
    """One end of the connection to a worker with a GPU on another host; `there` and `back` are its groups."""

    def __init__(
        self, peer: int, window: int, device: torch.device, there: dist.ProcessGroup, back: dist.ProcessGroup
    ) -> None:
        self._peer = peer
        self._window = window
        self._device = device
        self._there, self._back = there, back
        self._heads = RemoteLink(peer, _MOST_HEADS)
        # Operations in progress, with their buffers.
        self._sent: dict[int, deque[tuple[dist.Work, Buffer]]] = defaultdict(deque)
        # A message that does not use NCCL has no buffer here.
        self._arrived: dict[int, deque[tuple[dist.Work | None, Buffer | None]]] = defaultdict(deque)

    @property
    def buffer_count(self) -> int:
        """The number of buffers of operations in progress, and of headers."""
        sent, arrived = map(len, self._sent.values()), map(len, self._arrived.values())
        return sum(sent) + sum(arrived) + self._heads.buffer_count

    def send(
        self, channel: int, number: int, tensors: Sequence[Tensor | None], note: str, seconds: float
    ) -> None:
        """Send a message; blocks only if the window of messages in flight is full."""
        if not any(tensor is not None and tensor.is_cuda for tensor in tensors):
            self._heads.send(_HEADS, number, [], str(channel), seconds)
            self._heads.send(_HEADS + 1 + channel, number, tensors, note, seconds)
            return
        sent = self._sent[channel]
        while sent and (len(sent) >= self._window or sent[0][0].is_completed()):
            sent[0][0].wait(timedelta(seconds=seconds))
            sent.popleft()
        packing = packing_of(tensors, note)
        buffer = self._buffer(torch.empty(packing.head_size, dtype=torch.uint8), packing.size)
        buffer.write(number, packing, tensors)
        work = self._post(dist.isend, buffer, self._there)
        if work is not None:
            sent.append((work, buffer))
        self._heads.send(_HEADS, number, [buffer.flat], str(channel), seconds)

    def expect(self, channel: int) -> None:
        """Post the receive for the next header of the channel."""
        self._heads.expect(_HEADS)

    def receive(self, channel: int, seconds: float) -> Message:
        """The next message of `channel`; waits at most `seconds` for its header.

        Later work on the current stream waits for its tensors.
        """
        while not self._arrived[channel]:
            self._take_head(self._heads.receive(_HEADS, seconds))
        work, buffer = self._arrived[channel].popleft()
        if buffer is None:
            return self._heads.receive(_HEADS + 1 + channel, seconds)
        if work is not None:
            work.wait()
        return Message(buffer.read(), lambda: None)

    def close(self, seconds: float) -> None:
        """Wait for all operations in progress."""
        works = [work for sent in self._sent.values() for work, _ in sent]
        works += [work for arrived in self._arrived.values() for work, _ in arrived if work is not None]
        for work in works:
            work.wait(timedelta(seconds=seconds))
        self._heads.close(seconds)

    def _take_head(self, head: Message) -> None:
        """Post the receive of the tensors that a header announces."""
        channel = int(head.content.note)
        if not head.content.tensors:
            head.release()
            self._arrived[channel].append((None, None))
            return
        (header,) = head.content.tensors
        assert header is not None
        flat = header.clone()
        head.release()
        buffer = self._buffer(flat, Buffer(flat).message_size)
        self._arrived[channel].append((self._post(dist.irecv, buffer, self._back), buffer))

    def _buffer(self, head: Tensor, size: int) -> Buffer:
        """New memory for a message, from torch's caching allocator."""
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return Buffer(head, GpuMemory(memory, torch.cuda.Event()))

    def _post(self, operation: Any, buffer: Buffer, group: dist.ProcessGroup) -> dist.Work | None:
        """Start sending or receiving the tensors of a message; None if they are all empty."""
        assert buffer.gpu is not None
        content = buffer.gpu.flat[buffer.capacity :]
        if not content.numel():
            return None
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, content, self._peer, group)])
        return work


@dataclass(frozen=True)
class NcclPeers:
    """The peers of a worker that might be reached by NCCL, and the identity of its GPU for NCCL."""

    gpu: str
    peers: tuple[int, ...]

    @staticmethod
    def of(gpu: torch.device, peers: Sequence[int]) -> NcclPeers:
        # NCCL rejects two workers on one GPU, unless NCCL_HOSTID claims different hosts.
        name = f"{name_of(gpu)} {os.environ.get('NCCL_HOSTID', '')}"
        return NcclPeers(name, tuple(peers) if dist.is_nccl_available() else ())


def make_nccl_links(
    rank: int,
    hosts: Sequence[str],
    peers_of: Mapping[int, NcclPeers],
    window: int,
    deadline_s: float,
    device: torch.device | None,
) -> dict[int, NcclLink]:
    """Links of this worker to its peers with a GPU on another host; all ranks call it together.

    `peers_of` has an entry for every worker with a GPU; `device` is this worker's.
    """
    links = {}
    deadline = timedelta(seconds=deadline_s)
    for first, second in _remote_pairs(hosts, peers_of):
        member = rank in (first, second)
        # One group per direction, as in a common one a send would wait for an earlier receive.
        up, down = (
            dist.new_group([first, second], deadline, "nccl", device_id=device if member else None)
            for _ in range(2)
        )
        if member:
            assert device is not None
            peer, there, back = (second, up, down) if rank == first else (first, down, up)
            links[peer] = NcclLink(peer, window, device, there, back)
            for group, sends in ((up, rank == first), (down, rank == second)):
                _connect_group(peer, group, sends, device, deadline)
    return links


def _connect_group(
    peer: int, group: dist.ProcessGroup, sends: bool, device: torch.device, deadline: timedelta
) -> None:
    """Connect both ends of a group by a first message, as NCCL connects lazily."""
    operation = dist.isend if sends else dist.irecv
    nothing = torch.zeros(1, device=device)
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, nothing, peer, group)])
    work.wait(deadline)


def _remote_pairs(hosts: Sequence[str], peers_of: Mapping[int, NcclPeers]) -> list[tuple[int, int]]:
    """Pairs of peers with different GPUs on different hosts, in the same order on all ranks."""
    known = [(a, b) for a in peers_of for b in peers_of if a < b and hosts[a] != hosts[b]]
    apart = [(a, b) for a, b in known if peers_of[a].gpu != peers_of[b].gpu]
    return sorted((a, b) for a, b in apart if b in peers_of[a].peers and a in peers_of[b].peers)
