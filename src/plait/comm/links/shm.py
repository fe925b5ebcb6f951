"""Shared memory between two workers of one host: tensors cross with one copy, the sender's.

A socket between the two tells which buffer holds the next message and which is free again. Buffers are
files without a name, handed over through the socket, so nothing is left behind however a worker ends. A
sender that finds no free buffer makes one, up to the window. Sizes are rounded, so that messages of many
sizes share buffers. No call waits: what a full socket does not take goes out later. Tensors of a GPU whose
memory the peer can read stay there: the file then holds the message's description and, behind it, the handle
of that memory.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.links.cuda_ipc import GpuMemory
from plait.comm.links.packing import Buffer, Message, Packing, packing_of

_NOTICE = struct.Struct("<BIIQ")
_FULL, _FREE, _END, _FULL_GPU = 1, 2, 3, 4
_PAGE = mmap.PAGESIZE
_WITH_FILES = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
# Room beside a notice for one descriptor.
_EXTRA = socket.CMSG_LEN(struct.calcsize("i"))


@dataclass
class _SendSlot:
    """One buffer of ours; `descriptor` is its file until the peer has been handed it."""

    number: int
    buffer: Buffer
    descriptor: int | None


class SharedLink:
    """One end of the connection to a worker of the same host; `gpu` is this one's, if the peer reads it."""

    def __init__(self, connection: socket.socket, gpu: torch.device | None = None) -> None:
        self._socket = connection
        self._gpu = gpu
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        # Messages given back whose last reader is still to run on the GPU.
        self._leaving: deque[tuple[torch.cuda.Event, int]] = deque()
        self._ours: list[_SendSlot] = []
        self._free: list[_SendSlot] = []
        self._theirs: dict[int, Buffer] = {}
        self._arrived: dict[int, deque[int]] = defaultdict(deque)
        self._under_way: dict[int, int] = defaultdict(int)
        self._channel_of: dict[int, int] = {}
        self.ended = False
        self.lost = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def under_way(self, channel: int) -> int:
        """Messages sent on `channel` whose memory the peer has not given back."""
        return self._under_way[channel]

    @property
    def seen_gpu_bytes(self) -> int:
        """The peer's GPU memory that messages came in so far; it stays open."""
        return sum(buffer.size for buffer in self._theirs.values() if buffer.gpu is not None)

    def send(self, channel: int, number: int, tensors: Sequence[Tensor | None], note: str) -> None:
        """Copy a message into a free buffer and tell the peer; never waits."""
        self.take_notices()
        packing = packing_of(tensors, note)
        on_gpu = self._gpu is not None and any(t is not None and t.is_cuda for t in tensors)
        slot = self._find(packing, on_gpu)
        slot.buffer.write(number, packing, tensors)
        self._under_way[channel] += 1
        self._channel_of[slot.number] = channel
        notice = _NOTICE.pack(_FULL_GPU if on_gpu else _FULL, channel, slot.number, slot.buffer.capacity)
        self._tell(notice, slot.descriptor)
        slot.descriptor = None

    def take(self, channel: int) -> Message | None:
        """The next message of `channel`, if one has arrived."""
        if not self._arrived[channel]:
            return None
        number = self._arrived[channel].popleft()
        buffer = self._theirs[number]

        def release() -> None:
            if buffer.gpu is None:
                self._tell(_NOTICE.pack(_FREE, 0, number, 0))
            else:
                read = torch.cuda.Event()
                read.record()
                self._leaving.append((read, number))

        return Message(buffer.read(), release)

    def give_back(self, wait: bool = False) -> None:
        """Tell the peer of GPU memory that nobody reads any more; with `wait`, once nobody does."""
        while self._leaving and (wait or self._leaving[0][0].query()):
            read, number = self._leaving.popleft()
            read.synchronize()
            self._tell(_NOTICE.pack(_FREE, 0, number, 0))

    def take_notices(self) -> None:
        """Read what the peer has told, without waiting."""
        self.give_back()
        self._send_unsent()
        while not self.lost and not self.ended:
            try:
                data, extra, _, _ = self._socket.recvmsg(_NOTICE.size, _EXTRA, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer closed without reading all of ours; what it sent before can still be read.
                continue
            except OSError:
                data, extra = b"", []
            if not data:
                self.lost = True
                return
            kind, channel, number, size = _NOTICE.unpack(data)
            descriptors = [struct.unpack("i", content)[0] for _, _, content in extra]
            self._take_notice(kind, channel, number, size, descriptors)

    def _take_notice(self, kind: int, channel: int, number: int, size: int, descriptors: list[int]) -> None:
        if kind in (_FULL, _FULL_GPU):
            for descriptor in descriptors:
                self._theirs[number] = _open(descriptor, size, kind == _FULL_GPU)
                os.close(descriptor)
            self._arrived[channel].append(number)
        elif kind == _FREE:
            self._free.append(self._ours[number])
            self._under_way[self._channel_of.pop(number)] -= 1
        else:
            self.ended = True

    def close(self) -> None:
        """Tell the peer that this end was closed on purpose."""
        self.give_back(wait=True)
        self._tell(_NOTICE.pack(_END, 0, 0, 0))
        self._socket.close()

    @property
    def has_unsent(self) -> bool:
        """Whether notices wait for the peer to read earlier ones."""
        return bool(self._unsent)

    def _tell(self, notice: bytes, descriptor: int | None = None) -> None:
        self._unsent.append((notice, descriptor))
        self._send_unsent()

    def _send_unsent(self) -> None:
        """Send what the socket takes now."""
        while self._unsent:
            notice, descriptor = self._unsent[0]
            files = [] if descriptor is None else [(*_WITH_FILES, struct.pack("i", descriptor))]
            try:
                self._socket.sendmsg([notice], files, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                # The peer is gone; whoever waits for it next reads the end of the connection and says so.
                pass
            self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def _find(self, packing: Packing, on_gpu: bool) -> _SendSlot:
        """The smallest free buffer that is large enough, or a new one."""
        fitting = [slot for slot in self._free if slot.buffer.fits(packing, on_gpu)]
        if fitting:
            slot = min(fitting, key=lambda s: s.buffer.size)
            self._free.remove(slot)
            return slot
        descriptor = os.memfd_create("plait")
        buffer = _make(descriptor, packing, self._gpu if on_gpu else None)
        slot = _SendSlot(len(self._ours), buffer, descriptor)
        self._ours.append(slot)
        return slot


def _make(descriptor: int, packing: Packing, gpu: torch.device | None) -> Buffer:
    """A buffer in a new file; where its tensors lie on a GPU, their memory's handle follows in the file."""
    size = _rounded(packing.size)
    capacity = _pages(size if gpu is None else packing.head_size)
    if gpu is None:
        os.ftruncate(descriptor, capacity)
        return Buffer(_map(descriptor, capacity))
    with torch.cuda.device(gpu):
        memory = GpuMemory.make(size, gpu)
        handle = memory.handle()
    os.ftruncate(descriptor, capacity + _pages(len(handle)))
    os.pwrite(descriptor, handle, capacity)
    return Buffer(_map(descriptor, capacity), memory)


def _open(descriptor: int, capacity: int, on_gpu: bool) -> Buffer:
    """A buffer that the peer has made."""
    if not on_gpu:
        return Buffer(_map(descriptor, capacity))
    handle = os.pread(descriptor, os.fstat(descriptor).st_size - capacity, capacity)
    return Buffer(_map(descriptor, capacity), GpuMemory.open(handle))


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _rounded(size: int) -> int:
    """The next of the sizes 4, 5, 6 and 7 times a power of two: at most a quarter more."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def _map(descriptor: int, size: int) -> Tensor:
    # By its path: Python's mmap would keep a descriptor open for each buffer.
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)


def wait_for_notices(links: Sequence[SharedLink], seconds: float) -> None:
    """Return when some peer has told something, and have it read; or after `seconds`."""
    poll = select.poll()
    by_descriptor = {link.fileno(): link for link in links if not link.ended and not link.lost}
    for descriptor, link in by_descriptor.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if link.has_unsent else 0))
    for descriptor, _ in poll.poll(max(0.0, seconds) * 1e3):
        by_descriptor[descriptor].take_notices()
