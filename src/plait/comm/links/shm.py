"""Messages in shared memory between two workers of one host: tensors are copied once, by the sender.

Notices over a socket say which buffer holds the next message and which is free again. A sender without a free
buffer makes a new one, up to the window. Sizes are rounded, so that messages of many sizes can share buffers.
No call blocks. Tensors on a GPU whose memory the peer can read stay there: the buffer's file then holds the
message's description, followed by the IPC handle of that memory.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import torch

from plait.comm.links.cuda_ipc import GpuMemory
from plait.comm.links.local import LocalLink, make_file, map_file
from plait.comm.links.packing import Buffer, Content, Message, OnSent, Packing, packing_of

_FULL, _FULL_GPU, _FREE = 1, 2, 3
_PAGE = mmap.PAGESIZE


@dataclass
class _SendSlot:
    """One send buffer; `descriptor` is its file until it was passed to the peer."""

    number: int
    buffer: Buffer
    descriptor: int | None


class SharedLink(LocalLink):
    """Messages to and from a worker of the same host; `gpu` is this worker's, if the peer can read it."""

    def __init__(self, connection: socket.socket, gpu: torch.device | None = None) -> None:
        super().__init__(connection)
        self._gpu = gpu
        # Released messages whose last reader on the GPU is not finished.
        self._leaving: deque[tuple[torch.cuda.Event, int]] = deque()
        self._ours: list[_SendSlot] = []
        self._free: list[_SendSlot] = []
        self._theirs: dict[int, Buffer] = {}
        self._arrived: dict[int, deque[int]] = defaultdict(deque)
        # By channel: the number of messages that the peer has not released.
        self.under_way = Counter[int]()
        self._channel_of: dict[int, int] = {}

    @property
    def seen_gpu_bytes(self) -> int:
        """The size of the peer's GPU memory that is opened here."""
        return sum(buffer.size for buffer in self._theirs.values() if buffer.gpu is not None)

    def send(self, channel: int, content: Content, on_sent: OnSent | None = None) -> int:
        """Copy a message into a free buffer and notify the peer; never blocks. Returns its bytes."""
        self.take_notices()
        packing = packing_of(content)
        on_gpu = self._gpu is not None and content.is_on_gpu
        slot = self._find(packing, on_gpu)
        slot.buffer.write(content, packing)
        self.under_way[channel] += 1
        self._channel_of[slot.number] = channel
        kind = _FULL_GPU if on_gpu else _FULL
        self.notify(kind, channel, slot.number, slot.buffer.capacity, slot.descriptor)
        slot.descriptor = None
        if on_sent is not None:
            on_sent()
        return packing.size

    def take(self, channel: int) -> Message | None:
        """The next message of `channel`, if one has arrived."""
        if not self._arrived[channel]:
            return None
        number = self._arrived[channel].popleft()
        buffer = self._theirs[number]

        def release() -> None:
            if buffer.gpu is None:
                self.notify(_FREE, 0, number)
            else:
                read = torch.cuda.Event()
                read.record()
                self._leaving.append((read, number))

        return Message(buffer.read(), release)

    def give_back(self, wait: bool = False) -> None:
        """Return GPU memory to the peer if its readers are finished; with `wait`, wait for them."""
        while self._leaving and (wait or self._leaving[0][0].query()):
            read, number = self._leaving.popleft()
            read.synchronize()
            self.notify(_FREE, 0, number)

    def take_notices(self) -> None:
        """Read the notices that the peer has sent, without blocking."""
        self.give_back()
        self.send_unsent()
        for kind, channel, number, size, descriptor in self.notices(with_files=True):
            if kind == _FREE:
                self._free.append(self._ours[number])
                self.under_way[self._channel_of.pop(number)] -= 1
                continue
            if descriptor is not None:
                self._theirs[number] = _open(descriptor, size, kind == _FULL_GPU)
                os.close(descriptor)
            self._arrived[channel].append(number)

    def close(self) -> None:
        self.give_back(wait=True)
        super().close()

    def _find(self, packing: Packing, on_gpu: bool) -> _SendSlot:
        """The smallest free buffer that is large enough, else a new one."""
        fitting = [slot for slot in self._free if slot.buffer.fits(packing, on_gpu)]
        if fitting:
            slot = min(fitting, key=lambda s: s.buffer.size)
            self._free.remove(slot)
            return slot
        buffer, descriptor = _make(packing, self._gpu if on_gpu else None)
        slot = _SendSlot(len(self._ours), buffer, descriptor)
        self._ours.append(slot)
        return slot


def _make(packing: Packing, gpu: torch.device | None) -> tuple[Buffer, int]:
    """A buffer in a new file; for GPU tensors the file also contains the handle of their memory."""
    size = _rounded(packing.size)
    capacity = _pages(size if gpu is None else packing.head_size)
    if gpu is None:
        descriptor = make_file(capacity)
        return Buffer(map_file(descriptor, capacity)), descriptor
    with torch.cuda.device(gpu):
        memory = GpuMemory.make(size, gpu)
        handle = memory.handle()
    descriptor = make_file(capacity + _pages(len(handle)))
    os.pwrite(descriptor, handle, capacity)
    return Buffer(map_file(descriptor, capacity), memory), descriptor


def _open(descriptor: int, capacity: int, on_gpu: bool) -> Buffer:
    """Open a buffer that the peer has made."""
    if not on_gpu:
        return Buffer(map_file(descriptor, capacity))
    handle = os.pread(descriptor, os.fstat(descriptor).st_size - capacity, capacity)
    return Buffer(map_file(descriptor, capacity), GpuMemory.open(handle))


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _rounded(size: int) -> int:
    """`size` rounded up to 4, 5, 6 or 7 times a power of two: at most a quarter more."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step
