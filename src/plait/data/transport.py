"""Messages between a loader process and its worker, over a pipe of `multiprocessing`.

Torch's queues create a segment in /dev/shm for every tensor: each needs a descriptor, fails if a container
has 64 MB there, and stays if the process is killed before it unlinks the name. Here a large message is one
memfd, which has no name, and its descriptor is sent after the message. Nothing is pickled: values are sent as
text and raw bytes (see trees.py).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

from plait.data import trees

# The length of the text, which follows; then the tensors.
_HEAD = struct.Struct("<q")
_ALIGNMENT = 64
# Several messages of this size fit into a pipe's buffer, so sending them never blocks.
_INLINE_BYTES = 1 << 16


def send(to: Connection, value: Any) -> None:
    """Send a value (see trees.py for which); the tensors in it are copied once."""
    tensors: list[Tensor] = []
    text = json.dumps(trees.take_apart(value, tensors)).encode()
    parts: list[Any] = [_HEAD.pack(len(text)), text, _padding(_HEAD.size + len(text))]
    for tensor in tensors:
        parts += [tensor.reshape(-1).view(torch.uint8).numpy(), _padding(tensor.nbytes)]
    if sum(map(len, parts)) <= _INLINE_BYTES:
        to.send_bytes(b"".join(parts))
        return
    with open(os.memfd_create("plait-batch"), "wb") as file:
        file.writelines(parts)
        file.flush()
        to.send_bytes(b"")  # a descriptor follows
        send_handle(to, file.fileno(), None)


def receive(from_: Connection, pin: bool = False) -> Any:
    """The next value; EOFError if the other end is gone. With `pin`, in pinned memory."""
    message = bytearray(from_.recv_bytes()) or _receive_file(from_)
    offset = _HEAD.size + _HEAD.unpack_from(message)[0]
    content = json.loads(message[_HEAD.size : offset])
    memory = torch.frombuffer(message, dtype=torch.uint8)
    storage = (memory.pin_memory() if pin else memory).untyped_storage()

    def next_tensor(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        nonlocal offset
        begin = offset + len(_padding(offset))
        offset = begin + torch.Size(shape).numel() * dtype.itemsize
        # Not a view, since views share autograd's version counter.
        return torch.empty(0, dtype=dtype).set_(storage, begin // dtype.itemsize, shape, ())

    return trees.put_together(content, next_tensor)


def _receive_file(from_: Connection) -> mmap.mmap:
    try:
        descriptor = recv_handle(from_)
    except ConnectionError:
        raise
    except (RuntimeError, OSError) as failure:
        raise RuntimeError(
            "no descriptor is left to receive a batch with; raise the limit (ulimit -n)"
        ) from failure
    try:
        # Map all pages at once, as page faults would take longer than the copy.
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def _padding(size: int) -> bytes:
    """Padding after `size` bytes, for the alignment of the next tensor."""
    return bytes(-size % _ALIGNMENT)
