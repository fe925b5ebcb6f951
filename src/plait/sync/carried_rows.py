"""State that replicas carry for their own samples: each row comes from the worker that wrote it last."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.workloads.language.carried_state import CarriedState


@torch.no_grad()
def merge_rows(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give all workers every stream's newest state; all workers of the group call it together.

    Data-parallel workers each continue the streams of their own share of a batch. Averages of such states
    would mean nothing.
    """
    for module in model.modules():
        if isinstance(module, CarriedState):
            _merge(module, group)


def _merge(state: CarriedState, group: dist.ProcessGroup | None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    newest = state.written.clone()
    dist.all_reduce(newest, dist.ReduceOp.MAX, group=group)
    # The first of those that have the newest; workers that agree already all have it.
    owner = torch.where(state.written == newest, rank, size)
    dist.all_reduce(owner, dist.ReduceOp.MIN, group=group)
    is_other = (owner != rank).unsqueeze(1)
    for rows in state.rows():
        _sum_rows(rows, is_other, group)
    state.written.copy_(newest)


def _sum_rows(rows: Tensor, is_other: Tensor, group: dist.ProcessGroup | None) -> None:
    own = rows.masked_fill(is_other, 0.0)
    dist.all_reduce(own, group=group)
    rows.copy_(own)
