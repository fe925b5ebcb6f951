"""Buffers of replicas: running statistics become the mean; what is the same everywhere stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def average(buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None, samples: int = 1) -> None:
    """Give all workers of the group the same of each buffer that differs between them; all call it together.

    Numbers become the mean, weighted by the `samples` that each worker has seen since the last call. Integers
    become the largest: BatchNorm's `num_batches_tracked` counts the forwards of one worker, and its next one
    must weigh as it would have. Masks and tables, which may hold infinities, are equal on all of them and are
    not touched.
    """
    share = _share(samples, buffers, group)
    # As real numbers, which sums are made of.
    views = [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
    alike = sorted((v for v in views if v.numel()), key=lambda v: str(v.dtype))
    for dtype, found in groupby(alike, key=lambda v: v.dtype):
        if dtype.is_floating_point:
            _average_alike(list(found), group, share)
        else:
            _take_largest(list(found), group)


def _share(samples: int, buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> float:
    """This worker's part of all samples that the group has seen; where nobody saw any, all have the same."""
    if not buffers:
        return 1.0
    total = torch.tensor([float(samples)], dtype=torch.float64, device=buffers[0].device)
    dist.all_reduce(total, group=group)
    seen = float(total)
    return samples / seen if seen else 1.0 / dist.get_world_size(group)


def _average_alike(buffers: Sequence[Tensor], group: dist.ProcessGroup | None, share: float) -> None:
    """The mean of buffers of one type, which travel together."""

    def mean(own: Tensor) -> None:
        # Not a product with zero, of which an infinity makes no number.
        own.mul_(share) if share else own.zero_()
        dist.all_reduce(own, group=group)

    _replace_unlike(buffers, group, mean)


def _take_largest(buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """The largest of integers of one type; of two truth values, true."""

    def largest(own: Tensor) -> None:
        wide = own.to(torch.int64)
        dist.all_reduce(wide, dist.ReduceOp.MAX, group=group)
        own.copy_(wide)

    _replace_unlike(buffers, group, largest)


def _replace_unlike(
    buffers: Sequence[Tensor], group: dist.ProcessGroup | None, combine: Callable[[Tensor], None]
) -> None:
    """Replace the buffers that are not the same on all workers by what `combine` makes of them together."""
    members = dist.get_process_group_ranks(group)
    sizes = [buffer.numel() for buffer in buffers]
    own = torch.cat([buffer.flatten() for buffer in buffers])
    first = own.clone()
    dist.broadcast(first, members[0], group=group)
    unlike = [not torch.equal(a, b) for a, b in zip(first.split(sizes), own.split(sizes))]
    anywhere = torch.tensor(unlike, dtype=torch.float32, device=own.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    if not anywhere.any():
        return
    combine(own)
    for buffer, found, differs in zip(buffers, own.split(sizes), anywhere.tolist()):
        if differs:
            buffer.copy_(found.view_as(buffer))
