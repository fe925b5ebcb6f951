"""Buffers of replicas: running statistics become the mean; what is the same everywhere stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def average(buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give all workers of the group the mean of each buffer that differs between them; all call it together.

    Masks and tables, which may hold infinities, are equal on all of them and are not touched.
    """
    floating = sorted((b for b in buffers if b.is_floating_point()), key=lambda b: str(b.dtype))
    for _, alike in groupby(floating, key=lambda b: b.dtype):
        _average_alike(list(alike), group)


def _average_alike(buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """The same for buffers of one type, which travel together."""
    members = dist.get_process_group_ranks(group)
    sizes = [buffer.numel() for buffer in buffers]
    own = torch.cat([buffer.flatten() for buffer in buffers])
    first = own.clone()
    dist.broadcast(first, members[0], group=group)
    unlike = [not torch.equal(a, b) for a, b in zip(first.split(sizes), own.split(sizes))]
    anywhere = torch.tensor(unlike, dtype=torch.float32, device=own.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    own /= len(members)
    dist.all_reduce(own, group=group)
    for buffer, mean, differs in zip(buffers, own.split(sizes), anywhere.tolist()):
        if differs:
            buffer.copy_(mean.view_as(buffer))
