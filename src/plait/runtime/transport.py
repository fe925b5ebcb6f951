"""Messages between a loader process and its worker, over a socket.

Torch's own queues create a named segment in /dev/shm for every tensor, which stays there if the process is
killed before it unlinks the name. Here a large message is one memfd, which has no name, and its descriptor is
sent with the message.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
from typing import Any

import torch
from torch import Tensor

# The bytes of the message, how many of them are the pickle, and whether they are in a memfd.
_HEAD = struct.Struct("<qq?")
_ALIGNMENT = 64
# Several messages of this size fit into a socket's buffer, so sending them never blocks.
_INLINE_BYTES = 1 << 14


def send(to: socket.socket, value: Any) -> None:
    """Send any value that pickle takes; the tensors in it are copied once."""
    pickled, tensors = _taken_apart(value)
    offsets, size = _offsets(len(pickled), tensors)
    in_file = size > _INLINE_BYTES
    head = _HEAD.pack(size, len(pickled), in_file)
    if not in_file:
        body = bytearray(size)
        body[: len(pickled)] = pickled
        for offset, tensor in zip(offsets, tensors):
            body[offset : offset + tensor.nbytes] = _bytes_of(tensor)
        to.sendall(head + body)
        return
    file = os.memfd_create("plait-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        _write(file, pickled, 0)
        for offset, tensor in zip(offsets, tensors):
            _write(file, _bytes_of(tensor), offset)
        socket.send_fds(to, [head], [file])
    finally:
        os.close(file)


def receive(from_: socket.socket, pin: bool = False) -> Any:
    """The next value that was sent; EOFError when the other end is gone. With `pin`, in pinned memory."""
    head, files = _receive_head(from_)
    size, pickled_size, in_file = _HEAD.unpack(head)
    if not in_file:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        _fill(from_, _view(memory))
        return _put_together(memory, memory.numpy(), pickled_size, pin)
    if not files:
        raise RuntimeError("no descriptor is left to receive a batch with; raise the limit (ulimit -n)")
    (file,) = files
    try:
        if pin:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            _read(file, _view(memory))
            return _put_together(memory, memory.numpy(), pickled_size, pin)
        # Map all pages at once: a page fault for each would take longer than the copy.
        mapped = mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return _put_together(None, mapped, pickled_size, pin)
    finally:
        os.close(file)


class _Pickler(pickle.Pickler):
    """Pickles a value and collects its plain tensors separately."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        self.tensors.append(obj.contiguous())
        return len(self.tensors) - 1, str(obj.dtype).removeprefix("torch."), tuple(obj.shape)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


class _Unpickler(pickle.Unpickler):
    """Rebuilds tensors as views of `memory` or, without it, on top of `buffer`."""

    def __init__(self, file: io.BytesIO, offset: int, memory: Tensor | None, buffer: Any) -> None:
        super().__init__(file)
        self._offset = offset
        self._memory = memory
        self._buffer = buffer

    def persistent_load(self, pid: Any) -> Tensor:
        # Tensors are loaded in the order in which they were collected, which is that of their offsets.
        _, name, shape = pid
        dtype: torch.dtype = getattr(torch, name)
        count = torch.Size(shape).numel()
        begin = _aligned(self._offset)
        self._offset = begin + count * dtype.itemsize
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if self._memory is not None:
            return self._memory[begin : self._offset].view(dtype).view(shape)
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=begin).view(shape)


def _taken_apart(value: Any) -> tuple[memoryview, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getbuffer(), pickler.tensors


def _put_together(memory: Tensor | None, buffer: Any, pickled_size: int, pin: bool) -> Any:
    # Views share autograd's version counter: fine for tensors that are copied to a GPU, not for others.
    shared = memory if pin else None
    return _Unpickler(io.BytesIO(memoryview(buffer)[:pickled_size]), pickled_size, shared, buffer).load()


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
