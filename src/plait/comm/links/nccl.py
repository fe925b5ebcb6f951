"""NCCL between GPUs of two hosts: tensors go from memory to memory, what is said of them over gloo.

NCCL has no tags, and an operation of it holds its stream until the other end has come. So a receive is posted
only once the head of its message says that the send was, and all in the order of the sends, whichever channel
asks. Every wait of this thread is for a head, with a deadline; tensors are waited for on the GPU. Messages
without a tensor on a GPU go over gloo altogether.
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
# Heads are small; what may be under way is counted by channel.
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
        # Operations under way, with the memory that they use.
        self._sent: dict[int, deque[tuple[dist.Work, Buffer]]] = defaultdict(deque)
        # A message that is not on its way by NCCL has no buffer here.
        self._arrived: dict[int, deque[tuple[dist.Work | None, Buffer | None]]] = defaultdict(deque)

    @property
    def buffer_count(self) -> int:
        """The buffers of operations under way, and those of the heads of messages."""
        sent, arrived = map(len, self._sent.values()), map(len, self._arrived.values())
        return sum(sent) + sum(arrived) + self._heads.buffer_count

    def send(
        self, channel: int, number: int, tensors: Sequence[Tensor | None], note: str, seconds: float
    ) -> None:
        """Start a message on its way; waits only where a window of messages is under way already."""
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
        """Post the receive for the next head; they are small, and one comes for every channel."""
        self._heads.expect(_HEADS)

    def receive(self, channel: int, seconds: float) -> Message:
        """The next message of `channel`, its head waited for `seconds` at most.

        What the current stream does from now on comes after its tensors.
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
        """Wait for all that is under way."""
        works = [work for sent in self._sent.values() for work, _ in sent]
        works += [work for arrived in self._arrived.values() for work, _ in arrived if work is not None]
        for work in works:
            work.wait(timedelta(seconds=seconds))
        self._heads.close(seconds)

    def _take_head(self, head: Message) -> None:
        """Post the receive of the tensors that a head announces."""
        channel = int(head.content.note)
        if not head.content.tensors:
            head.release()
            self._arrived[channel].append((None, None))
            return
        (said,) = head.content.tensors
        assert said is not None
        flat = said.clone()
        head.release()
        buffer = self._buffer(flat, Buffer(flat).message_size)
        self._arrived[channel].append((self._post(dist.irecv, buffer, self._back), buffer))

    def _buffer(self, head: Tensor, size: int) -> Buffer:
        """New memory for a message; torch reuses what was released, in the order of the stream."""
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return Buffer(head, GpuMemory(memory, torch.cuda.Event()))

    def _post(self, operation: Any, buffer: Buffer, group: dist.ProcessGroup) -> dist.Work | None:
        """Start to send or receive the tensors of a message; None where they are all empty."""
        assert buffer.gpu is not None
        content = buffer.gpu.flat[buffer.capacity :]
        if not content.numel():
            return None
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, content, self._peer, group)])
        return work


@dataclass(frozen=True)
class NcclPeers:
    """The peers that a worker can reach by NCCL, and its GPU, by a name that NCCL knows it by."""

    gpu: str
    peers: tuple[int, ...]

    @staticmethod
    def of(gpu: torch.device, peers: Sequence[int]) -> NcclPeers:
        # NCCL refuses two workers on one GPU, unless they claim to be on different hosts.
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
    """Links of this worker to those of its peers that have a GPU on another host; all ranks call it together.

    `peers_of` is of every worker that has a GPU, `device` is this one's.
    """
    links = {}
    deadline = timedelta(seconds=deadline_s)
    for first, second in _far_pairs(hosts, peers_of):
        member = rank in (first, second)
        # One group for each direction: in one, a send would wait for the receive before it.
        up, down = (
            dist.new_group([first, second], deadline, "nccl", device_id=device if member else None)
            for _ in range(2)
        )
        if member:
            assert device is not None
            peer, there, back = (second, up, down) if rank == first else (first, down, up)
            links[peer] = NcclLink(peer, window, device, there, back)
            for group, sends in ((up, rank == first), (down, rank == second)):
                _meet(peer, group, sends, device, deadline)
    return links


def _meet(
    peer: int, group: dist.ProcessGroup, sends: bool, device: torch.device, deadline: timedelta
) -> None:
    """Let both ends of a group connect: NCCL does so at their first message, and each waits for the other."""
    operation = dist.isend if sends else dist.irecv
    nothing = torch.zeros(1, device=device)
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, nothing, peer, group)])
    work.wait(deadline)


def _far_pairs(hosts: Sequence[str], peers_of: Mapping[int, NcclPeers]) -> list[tuple[int, int]]:
    """Pairs of peers with GPUs of their own on different hosts, in one order for all."""
    known = [(a, b) for a in peers_of for b in peers_of if a < b and hosts[a] != hosts[b]]
    apart = [(a, b) for a, b in known if peers_of[a].gpu != peers_of[b].gpu]
    return sorted((a, b) for a, b in apart if b in peers_of[a].peers and a in peers_of[b].peers)
