"""Messages: tensors packed into one flat buffer that says itself what it holds.

The description is read only where it differs from the one before, so shapes are agreed once and again
when they change.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from plait.comm.links.cuda_ipc import GpuMemory

# The number of the message (a microbatch), the whole message's bytes, the description's bytes; a channel of
# the other direction, and how many messages the sender has received on that.
_PREFIX = struct.Struct("<qqqqq")
_ALIGNMENT = 64

# A channel, and how many of its messages have been received.
Received = tuple[int, int]
NONE_RECEIVED: Received = (-1, 0)

Signature = tuple[tuple[str, tuple[int, ...]] | None, ...]


@dataclass(frozen=True)
class Content:
    """What a message brought: tensors (None where there was none), its number and its note."""

    number: int
    tensors: tuple[Tensor | None, ...]
    note: str


@dataclass(frozen=True)
class Packing:
    """Where each tensor of a message lies; `size` is the whole message's."""

    signature: Signature
    note: str
    description: bytes
    offsets: tuple[int, ...]
    size: int

    @property
    def head_size(self) -> int:
        """The bytes before the first tensor."""
        return _aligned(_PREFIX.size + len(self.description))


def packing_of(tensors: Sequence[Tensor | None], note: str = "") -> Packing:
    """The packing that these tensors need."""
    return _packing(tuple(None if t is None else (str(t.dtype), tuple(t.shape)) for t in tensors), note)


@lru_cache(maxsize=1024)
def _packing(signature: Signature, note: str) -> Packing:
    description = json.dumps([signature, note]).encode()
    place = _aligned(_PREFIX.size + len(description))
    offsets = []
    for spec in signature:
        offsets.append(place)
        place = _aligned(place + _bytes(spec))
    return Packing(signature, note, description, tuple(offsets), place)


@lru_cache(maxsize=1024)
def _packing_from(description: bytes) -> Packing:
    found, note = json.loads(description)
    return _packing(tuple(None if s is None else (s[0], tuple(s[1])) for s in found), note)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _bytes(spec: tuple[str, tuple[int, ...]] | None) -> int:
    if spec is None:
        return 0
    size = _dtype(spec[0]).itemsize
    for length in spec[1]:
        size *= length
    return size


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


class Buffer:
    """Flat memory for messages, one after the other; views into it are made once for each packing.

    With `gpu`, the tensors lie there, and `flat` holds only what the message says of itself.
    """

    def __init__(self, flat: Tensor, gpu: GpuMemory | None = None) -> None:
        self.flat = flat
        self.gpu = gpu
        self._bytes = memoryview(flat.numpy().data)
        self._views: dict[Packing, tuple[Tensor | None, ...]] = {}

    @property
    def capacity(self) -> int:
        return self.flat.numel()

    @property
    def size(self) -> int:
        """The bytes that there are for tensors."""
        return (self.flat if self.gpu is None else self.gpu.flat).numel()

    @property
    def message_size(self) -> int:
        """The bytes of the message in the buffer, head and tensors."""
        return int(_PREFIX.unpack_from(self._bytes)[1])

    def fits(self, packing: Packing, on_gpu: bool) -> bool:
        """Whether a message can be written, its tensors to where they are to lie."""
        if (self.gpu is not None) != on_gpu:
            return False
        return packing.head_size <= self.capacity and packing.size <= self.size

    def write(
        self,
        number: int,
        packing: Packing,
        tensors: Sequence[Tensor | None],
        received: Received = NONE_RECEIVED,
    ) -> None:
        """Copy a message into the buffer, from whatever device its tensors are on."""
        head = _PREFIX.pack(number, packing.size, len(packing.description), *received) + packing.description
        self._bytes[: len(head)] = head
        for view, tensor in zip(self._view(packing), tensors):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())
        if self.gpu is not None:
            self.gpu.written.record()

    def write_need(self, size: int) -> None:
        """Say that the next message needs a buffer of `size` bytes instead of a message."""
        self._bytes[: _PREFIX.size] = _PREFIX.pack(-1, size, 0, *NONE_RECEIVED)

    def need(self) -> int | None:
        """The size that `write_need` asked for; None where there is a message."""
        _, size, length, *_ = _PREFIX.unpack_from(self._bytes)
        return None if length else int(size)

    def received(self) -> Received:
        """What the sender had received when it wrote this."""
        *_, channel, count = _PREFIX.unpack_from(self._bytes)
        return channel, count

    def read(self) -> Content:
        """The message in the buffer; its tensors are views, good until the next one is written.

        On a GPU, what the current stream does from now on comes after the write.
        """
        if self.gpu is not None:
            self.gpu.written.wait()
        number, _, length, *_ = _PREFIX.unpack_from(self._bytes)
        packing = _packing_from(bytes(self._bytes[_PREFIX.size : _PREFIX.size + length]))
        return Content(number, self._view(packing), packing.note)

    def _view(self, packing: Packing) -> tuple[Tensor | None, ...]:
        if packing not in self._views:
            if len(self._views) > 64:
                self._views.clear()
            self._views[packing] = tuple(map(self._cut, packing.signature, packing.offsets))
        return self._views[packing]

    def _cut(self, spec: tuple[str, tuple[int, ...]] | None, offset: int) -> Tensor | None:
        if spec is None:
            return None
        memory = self.flat if self.gpu is None else self.gpu.flat
        return memory[offset : offset + _bytes(spec)].view(_dtype(spec[0])).view(spec[1])


@dataclass(frozen=True)
class Message:
    """A message received. `release` gives its memory back to the sender; its tensors are void then."""

    content: Content
    release: Callable[[], None]
