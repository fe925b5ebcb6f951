"""Parameters without a gradient on all workers or on some: those that one process moves are moved."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import DataSettings, ModelSettings
from support.plans import unverified_plan
from support.training import (
    largest_difference,
    saved_weights,
    train_each,
    train_here,
    train_rank,
    unverified_job,
)
from support.world import run_ranks

# 22 samples make parts of 7, 7 and 8; the last batch of an epoch has fewer, and no part of 8.
DATA = DataSettings("support.training:half_of_digits", 22)


class SometimesUsed(nn.Module):
    """Uses `some` for inputs of 8 samples only, and `none` never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some, self.none = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.some(x) if x.shape[0] == 8 else y


def sometimes_used() -> nn.Module:
    return nn.Sequential(nn.Flatten(), SometimesUsed(), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 10))


def test_workers_move_only_what_one_process_moves(tmp_path: Path) -> None:
    changes = {"model": ModelSettings("test_unused_parameters:sometimes_used"), "data": DATA, "steps": 35}
    _, expected = train_here(unverified_job(**changes, accumulate=3), tmp_path / "plain")
    run_ranks(3, train_each, {"shares": unverified_job(**changes)}, tmp_path)
    assert largest_difference(saved_weights(tmp_path / "shares"), expected) < 1e-10
    run_ranks(3, train_rank, unverified_plan((2, 1), Schedule.FLUSH, 3, **changes), tmp_path / "stage")
    found = saved_weights(tmp_path / "stage")
    assert largest_difference(found, expected) < 1e-10
