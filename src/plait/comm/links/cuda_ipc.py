"""Memory of a GPU that workers of one host share: tensors cross without passing through the host.

The workers may sit on one GPU, or on two that can reach each other's memory.
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
    """Bytes on a GPU, and an event that its stream reaches once what was last written is there."""

    flat: Tensor
    written: torch.cuda.Event

    @staticmethod
    def make(size: int, device: torch.device) -> GpuMemory:
        """New memory; to be called with `device` current."""
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return GpuMemory(memory, torch.cuda.Event(interprocess=True))

    def handle(self) -> bytes:
        """What another process opens this memory with."""
        shared = self.flat.untyped_storage()._share_cuda_()
        fields = [_plain(field) for field in (*shared[1:], self.written.ipc_handle())]
        return json.dumps([name_of(self.flat.device), *fields]).encode()

    @staticmethod
    def open(handle: bytes) -> GpuMemory:
        """The memory that another process of this host has made."""
        name, *fields = json.loads(handle.rstrip(b"\0"))
        *shared, event = (_original(field) for field in fields)
        index = _names().index(name)
        untyped: Any = torch.UntypedStorage._new_shared_cuda(index, *shared)
        flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(untyped)
        return GpuMemory(flat, torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), event))


def _plain(field: Any) -> Any:
    """A number as it is, bytes as text in a list of their own."""
    return [base64.b64encode(field).decode()] if isinstance(field, bytes) else field


def _original(field: Any) -> Any:
    return base64.b64decode(field[0]) if isinstance(field, list) else field


def name_of(device: torch.device) -> str:
    """A name of the GPU that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def reachable_from(device: torch.device) -> tuple[str, ...]:
    """The names of the GPUs whose memory `device` can read; its own is among them."""
    own = torch.cuda.current_device() if device.index is None else device.index
    return tuple(
        name
        for index, name in enumerate(_names())
        if index == own or torch.cuda.can_device_access_peer(own, index)
    )


def _names() -> list[str]:
    return [name_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
