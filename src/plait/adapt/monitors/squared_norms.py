"""Squared norms of gradients: one pass over the memory, no copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The length of one dot product, as float32 sums over many millions lose digits.
ELEMENTS = 1 << 20


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all elements, as one float64 on their device; 0 if there are none.

    Of DTensors it is that of the whole tensors; the workers of their mesh call it together.

    By dot products, as torch's float32 norms on CPUs are off by a thousandth over millions of elements, and
    the variance is estimated from differences of squared norms.
    """
    squares, sharded = [], dict[Any, list[Tensor]]()
    for tensor in tensors:
        if (mesh := getattr(tensor, "device_mesh", None)) is None:
            squares.append(_dot(tensor))
        else:
            shards: Any = tensor  # a DTensor, whose module takes long to import
            sharded.setdefault((mesh, shards.placements), []).append(_dot(shards.to_local()))
    squares += [_sum_of_shards(parts, *where) for where, parts in sharded.items()]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)


def _sum_of_shards(squares: Sequence[Tensor], mesh: Any, placements: Sequence[Any]) -> Tensor:
    """The sum over all shards of DTensors; the workers of their mesh call it together."""
    total = torch.stack(list(squares)).sum()
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(total, group=mesh.get_group(dimension))
    return total


def _dot(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    if not flat.numel():
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    return torch.stack([torch.dot(chunk, chunk) for chunk in flat.split(ELEMENTS)]).double().sum()


def trial_squared_norms(tensors: Iterable[Tensor], trials: int) -> Tensor:
    """Same as `squared_norm`, for each trial of tensors whose first axis is the trials."""
    if trials == 1:
        return squared_norm(tensors).view(1)
    squares = []
    for tensor in tensors:
        rows = tensor.detach().reshape(trials, -1)
        if rows.dtype not in (torch.float32, torch.float64):
            rows = rows.float()
        squares.append(torch.bmm(rows.unsqueeze(1), rows.unsqueeze(2)).reshape(trials).double())
    return torch.stack(squares).sum(0) if squares else torch.zeros(trials, dtype=torch.float64)


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
