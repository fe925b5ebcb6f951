"""State that replicas carry for their samples: each row is taken from the worker that wrote it last."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.workloads.language.carried_state import CarriedState


@torch.no_grad()
def merge_rows(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give the workers of the group the newest state of every stream; they call it together.

    Each data-parallel worker continues the streams of its share of a batch; averages of their states would be
    meaningless.
    """
    for module in model.modules():
        if isinstance(module, CarriedState):
            _merge(module, group)


def _merge(state: CarriedState, group: dist.ProcessGroup | None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    newest = state.written.clone()
    dist.all_reduce(newest, dist.ReduceOp.MAX, group=group)
    # The first worker with the newest state.
    owner = torch.where(state.written == newest, rank, size)
    dist.all_reduce(owner, dist.ReduceOp.MIN, group=group)
    is_other = (owner != rank).unsqueeze(1)
    for rows in state.rows():
        _sum_rows(rows, is_other, group)
    state.written.copy_(newest)


def _sum_rows(rows: Tensor, is_other: Tensor, group: dist.ProcessGroup | None) -> None:
    owned = rows.masked_fill(is_other, 0.0)
    dist.all_reduce(owned, group=group)
    rows.copy_(owned)
