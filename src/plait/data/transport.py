"""Messages between a loader process and its worker, over a socket.

Torch's own queues create a named segment in /dev/shm for every tensor, which stays there if the process is
killed before it unlinks the name. Here a large message is one memfd, which has no name, and its descriptor is
sent with the message. Nothing is pickled: values travel as text and raw bytes (see trees.py).
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.data import trees

# The bytes of the message, how many of them are its text, and whether they are in a memfd.
_HEAD = struct.Struct("<qq?")
_ALIGNMENT = 64
# Several messages of this size fit into a socket's buffer, so sending them never blocks.
_INLINE_BYTES = 1 << 14


def send(to: socket.socket, value: Any) -> None:
    """Send a value (see trees.py for which); the tensors in it are copied once."""
    text, tensors = _taken_apart(value)
    offsets, size = _offsets(len(text), tensors)
    in_file = size > _INLINE_BYTES
    head = _HEAD.pack(size, len(text), in_file)
    if not in_file:
        body = bytearray(size)
        body[: len(text)] = text
        for offset, tensor in zip(offsets, tensors):
            body[offset : offset + tensor.nbytes] = _bytes_of(tensor)
        to.sendall(head + body)
        return
    file = os.memfd_create("plait-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        _write(file, memoryview(text), 0)
        for offset, tensor in zip(offsets, tensors):
            _write(file, _bytes_of(tensor), offset)
        socket.send_fds(to, [head], [file])
    finally:
        os.close(file)


def receive(from_: socket.socket, pin: bool = False) -> Any:
    """The next value that was sent; EOFError when the other end is gone. With `pin`, in pinned memory."""
    head, files = _receive_head(from_)
    size, text_size, in_file = _HEAD.unpack(head)
    if not in_file:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        _fill(from_, _view(memory))
        return _put_together(memory, memory.numpy(), text_size, pin)
    if not files:
        raise RuntimeError("no descriptor is left to receive a batch with; raise the limit (ulimit -n)")
    (file,) = files
    try:
        if pin:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            _read(file, _view(memory))
            return _put_together(memory, memory.numpy(), text_size, pin)
        # Map all pages at once: a page fault for each would take longer than the copy.
        mapped = mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return _put_together(None, mapped, text_size, pin)
    finally:
        os.close(file)


def _taken_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """The value as text, and the tensors in it apart."""
    tensors: list[Tensor] = []
    return json.dumps(trees.take_apart(value, tensors)).encode(), tensors


def _put_together(memory: Tensor | None, buffer: Any, text_size: int, pin: bool) -> Any:
    # Views share autograd's version counter: fine for tensors that are copied to a GPU, not for others.
    shared = memory if pin else None
    tensors = _Tensors(text_size, shared, buffer)
    return trees.put_together(json.loads(bytes(memoryview(buffer)[:text_size])), tensors.next)


class _Tensors:
    """The tensors of a message in the order in which they were sent: views of `memory`, or on `buffer`."""

    def __init__(self, offset: int, memory: Tensor | None, buffer: Any) -> None:
        self._offset = offset
        self._memory = memory
        self._buffer = buffer

    def next(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        count = torch.Size(shape).numel()
        begin = _aligned(self._offset)
        self._offset = begin + count * dtype.itemsize
        if count == 0:
            return torch.empty(list(shape), dtype=dtype)
        if self._memory is not None:
            return self._memory[begin : self._offset].view(dtype).view(list(shape))
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=begin).view(list(shape))


def _offsets(begin: int, tensors: list[Tensor]) -> tuple[list[int], int]:
    offsets = []
    for tensor in tensors:
        offsets.append(_aligned(begin))
        begin = offsets[-1] + tensor.nbytes
    return offsets, begin


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: Tensor) -> memoryview:
    return _view(tensor.reshape(-1).view(torch.uint8))


def _view(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _write(file: int, part: memoryview, offset: int) -> None:
    while part:
        done = os.pwrite(file, part, offset)
        part, offset = part[done:], offset + done


def _read(file: int, memory: memoryview) -> None:
    offset = 0
    while offset < len(memory):
        done = os.preadv(file, [memory[offset:]], offset)
        if done == 0:
            raise EOFError
        offset += done


def _receive_head(from_: socket.socket) -> tuple[bytes, list[int]]:
    head, files, _, _ = socket.recv_fds(from_, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not head:
        raise EOFError
    rest = bytearray(_HEAD.size - len(head))
    _fill(from_, memoryview(rest))
    return head + rest, files


def _fill(from_: socket.socket, memory: memoryview) -> None:
    while memory:
        done = from_.recv_into(memory)
        if done == 0:
            raise EOFError
        memory = memory[done:]
