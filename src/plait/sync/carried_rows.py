"""State that replicas carry for their samples: each row is taken from the worker that wrote it last."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.workloads.language.carried_state import CarriedState


@torch.no_grad()
def merge_rows(model: nn.Module) -> None:
    """Give all workers the newest state of every stream; all workers call it together.

    Each data-parallel worker continues the streams of its share of a batch; averages of their states would be
    meaningless.
    """
    for module in model.modules():
        if isinstance(module, CarriedState):
            _merge(module)


def _merge(state: CarriedState) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    newest = state.written.clone()
    dist.all_reduce(newest, dist.ReduceOp.MAX)
    # The first worker with the newest state.
    owner = torch.where(state.written == newest, rank, size)
    dist.all_reduce(owner, dist.ReduceOp.MIN)
    is_other = (owner != rank).unsqueeze(1)
    for rows in state.rows():
        _sum_rows(rows, is_other)
    state.written.copy_(newest)


def _sum_rows(rows: Tensor, is_other: Tensor) -> None:
    owned = rows.masked_fill(is_other, 0.0)
    dist.all_reduce(owned)
    rows.copy_(owned)
