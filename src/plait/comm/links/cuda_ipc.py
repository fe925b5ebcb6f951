"""GPU memory that workers of one host share by CUDA IPC, so that tensors need no copy through the host.

The workers may use one GPU, or two with peer access.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class GpuMemory:
    """Bytes on a GPU, and an event that is recorded after the last write."""

    flat: Tensor
    written: torch.cuda.Event

    @staticmethod
    def make(size: int, device: torch.device) -> GpuMemory:
        """New memory; call it with `device` as the current device."""
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return GpuMemory(memory, torch.cuda.Event(interprocess=True))

    def handle(self) -> bytes:
        """The IPC handle with which another process opens this memory."""
        shared = self.flat.untyped_storage()._share_cuda_()
        fields = [_plain(field) for field in (*shared[1:], self.written.ipc_handle())]
        return json.dumps([name_of(self.flat.device), *fields]).encode()

    @staticmethod
    def open(handle: bytes) -> GpuMemory:
        """Open the memory of another process of this host."""
        name, *fields = json.loads(handle.rstrip(b"\0"))
        *shared, event = (_original(field) for field in fields)
        index = _names().index(name)
        untyped: Any = torch.UntypedStorage._new_shared_cuda(index, *shared)
        flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(untyped)
        return GpuMemory(flat, torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), event))


def _plain(field: Any) -> Any:
    """A number unchanged; bytes as text in a list."""
    return [base64.b64encode(field).decode()] if isinstance(field, bytes) else field


def _original(field: Any) -> Any:
    return base64.b64decode(field[0]) if isinstance(field, list) else field


def name_of(device: torch.device) -> str:
    """The UUID of the GPU, equal in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def reachable_from(device: torch.device) -> tuple[str, ...]:
    """The names of the GPUs whose memory `device` can read, including itself."""
    current = torch.cuda.current_device() if device.index is None else device.index
    return tuple(
        name
        for index, name in enumerate(_names())
        if index == current or torch.cuda.can_device_access_peer(current, index)
    )


def _names() -> list[str]:
    return [name_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
