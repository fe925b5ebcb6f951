"""Copies of one model on several workers: whether they are alike, and the state of rank 0 for all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.comm.collectives import all_gather_values, broadcast_value
from plait.core.errors import InputError


def check_same_model(model: nn.Module, what: str) -> None:
    """Refuse models that differ between workers, in the name of `what`; all workers call it together."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    specs = {name: f"{t.dtype} {list(t.shape)} {t.requires_grad}" for name, t in tensors.items()}
    digests = all_gather_values(hashlib.sha256(json.dumps(specs).encode()).hexdigest())
    rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if rank is None:
        return
    first: dict[str, str] = broadcast_value(specs, 0)
    other: dict[str, str] = broadcast_value(specs, rank)
    unlike = f"parameters are in another order on rank {rank} than on rank 0"
    for name in {**first, **other}:
        if first.get(name) != other.get(name):
            here, there = first.get(name, "missing"), other.get(name, "missing")
            unlike = f"{name} is {here} on rank 0 and {there} on rank {rank}"
            break
    raise InputError(f"{what}: the model differs between workers: {unlike}; build the same on all of them")


@torch.no_grad()
def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Copy the tensors of rank 0 to all workers, which call it together."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in by_kind.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, 0)
        if dist.get_rank() != 0:
            for tensor, part in zip(same, flat.split([t.numel() for t in same])):
                tensor.copy_(part.view_as(tensor))
