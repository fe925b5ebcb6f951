"""Buffers of replicas: running statistics become the mean; what is the same everywhere stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def average(buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give all workers of the group the mean of each buffer that differs between them; all call it together.

    Masks and tables, which may hold infinities, are equal on all of them and are not touched.
    """
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    if not floating:
        return
    members = dist.get_process_group_ranks(group)
    differs = []
    for buffer in floating:
        first = buffer.clone()
        dist.broadcast(first, members[0], group=group)
        differs.append(not torch.equal(first, buffer))
    anywhere = torch.tensor(differs, dtype=torch.float32, device=floating[0].device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    for buffer, found in zip(floating, anywhere.tolist()):
        if found:
            buffer /= len(members)
            dist.all_reduce(buffer, group=group)
