"""One model on all workers: refuses models that differ, and copies tensors of rank 0."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.api.world import World
from plait.comm.collectives import all_gather_values, broadcast_value
from plait.core.errors import InputError


def check_same_model(owner: str, module: nn.Module, world: World) -> None:
    """Refuse models that differ between workers; `owner` is the class that is given the model."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    specs = {name: f"{t.dtype} {list(t.shape)} {t.requires_grad}" for name, t in tensors.items()}
    digest = hashlib.sha256(json.dumps(specs).encode()).hexdigest()
    if len(set(all_gather_values(digest))) == 1:
        return
    first: Mapping[str, str] = broadcast_value(specs, 0)
    names = [name for name in {**first, **specs} if first.get(name) != specs.get(name)]
    unlike = names[0] if names else "the order of parameters"
    raise InputError(
        f"{owner}: the model differs between workers: on rank {world.rank} {unlike} is "
        f"{specs.get(unlike, 'not there')}, on rank 0 {first.get(unlike, 'not there')}; build the same "
        "model on all of them"
    )


@torch.no_grad()
def copy_of_first(tensors: Iterable[Tensor], world: World) -> None:
    """Copy the tensors of rank 0 to all workers."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in by_kind.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, 0)
        if world.rank != 0:
            for tensor, part in zip(same, flat.split([t.numel() for t in same])):
                tensor.copy_(part.view_as(tensor))
