"""Buffers of replicas: running statistics are averaged; buffers that are equal on all replicas are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def average(
    buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None, samples: int | Tensor = 1
) -> None:
    """Make buffers that differ between the workers of the group equal; all workers call it together.

    Floating-point buffers become the mean, weighted by the `samples` of each worker since the last call; if
    these are several numbers, they are those of trials, which are the first axis of the buffers.
    Integers become the maximum: BatchNorm's `num_batches_tracked` counts the forwards of one worker. Masks
    and tables, which may contain infinities, are equal on all workers and are not changed.
    """
    share = _share(samples, buffers, group)
    # Complex buffers as pairs of real numbers, for sums.
    views = [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
    by_dtype = sorted((v for v in views if v.numel()), key=lambda v: str(v.dtype))
    for dtype, same in groupby(by_dtype, key=lambda v: v.dtype):
        if dtype.is_floating_point:
            _average_differing(list(same), group, share)
        else:
            _take_maximum(list(same), group)


def _share(samples: int | Tensor, buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """This worker's share of the samples of the group; equal shares if there were no samples."""
    seen = torch.as_tensor(samples, dtype=torch.float64).view(-1, 1)
    if not buffers:
        return seen
    seen = seen.to(buffers[0].device)
    total = seen.clone()
    dist.all_reduce(total, group=group)
    return torch.where(total > 0, seen / total, 1.0 / dist.get_world_size(group))


def _average_differing(buffers: Sequence[Tensor], group: dist.ProcessGroup | None, share: Tensor) -> None:
    """The mean of buffers of one type, reduced together."""
    shares = torch.cat([share.expand(-1, b.numel() // len(share)).flatten() for b in buffers])

    def mean(flat: Tensor) -> None:
        # Not a product with zero, which is NaN for an infinity.
        flat.copy_(torch.where(shares > 0, flat * shares.to(flat.dtype), 0.0))
        dist.all_reduce(flat, group=group)

    _replace_differing(buffers, group, mean)


def _take_maximum(buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """The maximum of integers or booleans of one type."""

    def largest(flat: Tensor) -> None:
        wide = flat.to(torch.int64)
        dist.all_reduce(wide, dist.ReduceOp.MAX, group=group)
        flat.copy_(wide)

    _replace_differing(buffers, group, largest)


def _replace_differing(
    buffers: Sequence[Tensor], group: dist.ProcessGroup | None, combine: Callable[[Tensor], None]
) -> None:
    """Replace the buffers that differ between workers by the result of `combine`, which reduces in place."""
    members = dist.get_process_group_ranks(group)
    sizes = [buffer.numel() for buffer in buffers]
    local = torch.cat([buffer.flatten() for buffer in buffers])
    first = local.clone()
    dist.broadcast(first, members[0], group=group)
    differing = [not torch.equal(a, b) for a, b in zip(first.split(sizes), local.split(sizes))]
    anywhere = torch.tensor(differing, dtype=torch.float32, device=local.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    if not anywhere.any():
        return
    combine(local)
    for buffer, combined, differs in zip(buffers, local.split(sizes), anywhere.tolist()):
        if differs:
            buffer.copy_(combined.view_as(buffer))
