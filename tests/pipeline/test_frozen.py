"""Parameters that are frozen or unfrozen in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.core.errors import JobError
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import UNVERIFIED, ModelSettings
from support.plans import planned
from support.training import digits_job, largest_difference, saved_weights, train_here, train_rank
from support.world import run_ranks


class Changing(nn.Module):
    """A layer whose weight is frozen or unfrozen in its fifth training forward."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.layer.weight.requires_grad_(not frozen)
        self.frozen = frozen
        self.register_forward_pre_hook(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


FORWARDS = [0]


def count(module: Any, inputs: Any) -> None:
    # Not those of a trace, which has no values.
    FORWARDS[0] += module.training and type(inputs[0]) is torch.Tensor
    if FORWARDS[0] == 5:
        module.layer.weight.requires_grad_(module.frozen)


def changing(frozen: bool) -> nn.Module:
    FORWARDS[0] = 0
    return nn.Sequential(nn.Flatten(), Changing(frozen), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 10))


def job(frozen: bool) -> dict[str, Any]:
    model = ModelSettings("test_frozen:changing", {"frozen": frozen})
    return {"model": model, "steps": 8, "verify": UNVERIFIED}


def error_of(rank: int, settings: Any, folder: Path) -> str:
    FORWARDS[0] = 0
    try:
        train_rank(rank, settings, folder)
    except JobError as failure:
        return str(failure)
    return ""


def test_a_parameter_that_is_unfrozen_during_a_run_is_not_left_untrained_without_a_word(
    tmp_path: Path,
) -> None:
    with pytest.raises(JobError, match=r"parameter '1\.layer\.weight' was frozen when the run began"):
        train_here(digits_job(**job(frozen=True)), tmp_path / "plain")
    (words,) = run_ranks(
        1, error_of, planned((1,), Schedule.FLUSH, 1, **job(frozen=True)), tmp_path / "flush"
    )
    assert "parameter '1.layer.weight' was frozen when the run began" in words


def test_a_parameter_that_is_frozen_during_a_run_stays_so_or_is_refused(tmp_path: Path) -> None:
    _, expected = train_here(digits_job(**job(frozen=False)), tmp_path / "plain")
    flush = planned((1,), Schedule.FLUSH, 1, **job(frozen=False))
    assert run_ranks(1, error_of, flush, tmp_path / "flush") == [""]
    assert largest_difference(saved_weights(tmp_path / "flush"), expected) < 1e-10
    stash = planned((1,), Schedule.STASH, 1, **job(frozen=False))
    (words,) = run_ranks(1, error_of, stash, tmp_path / "stash")
    assert "parameter '1.layer.weight' was frozen during the run" in words
