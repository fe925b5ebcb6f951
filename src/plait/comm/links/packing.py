"""Messages: tensors packed into one flat, self-describing buffer.

The description is parsed only if it differs from the previous one, so it costs little while shapes are equal.
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

# The number of the message (a microbatch), the bytes of the message, the bytes of the description.
_PREFIX = struct.Struct("<qqq")
_ALIGNMENT = 64

Signature = tuple[tuple[str, tuple[int, ...]] | None, ...]
# Called once a message has left this worker, from any thread.
OnSent = Callable[[], None]


@dataclass(frozen=True)
class Content:
    """The content of a message: tensors or None, its number, and a text; `size` is that of a received one."""

    number: int
    tensors: Sequence[Tensor | None]
    note: str = ""
    size: int = 0

    @property
    def is_on_gpu(self) -> bool:
        """Whether some of the tensors are on a GPU."""
        return any(tensor is not None and tensor.is_cuda for tensor in self.tensors)


@dataclass(frozen=True)
class Packing:
    """The offset of each tensor of a message; `size` is that of the whole message."""

    signature: Signature
    note: str
    description: bytes
    offsets: tuple[int, ...]
    size: int

    @property
    def head_size(self) -> int:
        """The bytes before the first tensor."""
        return _aligned(_PREFIX.size + len(self.description))


def packing_of(content: Content) -> Packing:
    """The layout of a message with this content."""
    signature = (None if t is None else (str(t.dtype), tuple(t.shape)) for t in content.tensors)
    return _packing(tuple(signature), content.note)


@lru_cache(maxsize=1024)
def _packing(signature: Signature, note: str) -> Packing:
    description = json.dumps([signature, note]).encode()
    offset = _aligned(_PREFIX.size + len(description))
    offsets = []
    for spec in signature:
        offsets.append(offset)
        offset = _aligned(offset + _bytes(spec))
    return Packing(signature, note, description, tuple(offsets), offset)


@lru_cache(maxsize=1024)
def _packing_from(description: bytes) -> Packing:
    signature, note = json.loads(description)
    return _packing(tuple(None if s is None else (s[0], tuple(s[1])) for s in signature), note)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _bytes(spec: tuple[str, tuple[int, ...]] | None) -> int:
    return 0 if spec is None else torch.Size(spec[1]).numel() * _dtype(spec[0]).itemsize


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


class Buffer:
    """Flat memory for one message at a time; views into it are cached by packing.

    With `gpu`, the tensors are stored there, and `flat` holds only the header and description.
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
        """The capacity for tensors in bytes."""
        return (self.flat if self.gpu is None else self.gpu.flat).numel()

    @property
    def message_size(self) -> int:
        """The size of the message in the buffer, header and tensors."""
        return int(_PREFIX.unpack_from(self._bytes)[1])

    def fits(self, packing: Packing, on_gpu: bool) -> bool:
        """Whether a message fits, with its tensors on the right device."""
        if (self.gpu is not None) != on_gpu:
            return False
        return packing.head_size <= self.capacity and packing.size <= self.size

    def write(self, content: Content, packing: Packing) -> None:
        """Copy a message into the buffer, with tensors from any device."""
        head = _PREFIX.pack(content.number, packing.size, len(packing.description)) + packing.description
        self._bytes[: len(head)] = head
        for view, tensor in zip(self._view(packing), content.tensors):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())
        if self.gpu is not None:
            self.gpu.written.record()

    def read(self) -> Content:
        """The message in the buffer; its tensors are views, valid until the next write.

        On a GPU, later work on the current stream waits for the write.
        """
        if self.gpu is not None:
            self.gpu.written.wait()
        number, size, length = _PREFIX.unpack_from(self._bytes)
        packing = _packing_from(bytes(self._bytes[_PREFIX.size : _PREFIX.size + length]))
        return Content(number, self._view(packing), packing.note, size)

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
    """A received message. `release` returns its memory to the sender, which invalidates its tensors."""

    content: Content
    release: Callable[[], None]
