"""A metric that calls torch.distributed itself: computed where all workers do, refused in words elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait.schema.plans.schedules import Schedule
from plait.schema.settings import EvaluateSettings, TrainSettings
from plait.training.checks.first_evaluation import try_evaluation
from plait.training.components import build
from support.plans import planned
from support.training import digits_job, train_rank
from support.world import run_ranks

WORDS = "calls allreduce of torch.distributed, but not all workers compute it at the same time"


def summed(output: Tensor, target: Tensor) -> tuple[float, float]:
    """The accuracy over the samples of all workers."""
    pair = torch.tensor([float((output.argmax(1) == target).sum()), float(len(target))])
    dist.all_reduce(pair)
    return float(pair[0]), float(pair[1])


summed.mode = "max"  # type: ignore[attr-defined]
EVALUATED = {"steps": 2, "evaluate": EvaluateSettings(2, "test_metric_collectives:summed")}


def failure_of(rank: int, settings: TrainSettings, folder: Path) -> str:
    try:
        train_rank(rank, settings, folder)
    except Exception as failure:
        return str(failure)
    return ""


def tried(rank: int, settings: TrainSettings) -> str:
    """What the evaluation before the first step says."""
    try:
        return try_evaluation(build(settings, torch.device("cpu")), settings, rank, 2)
    except Exception as failure:
        return str(failure)


def test_in_stages_it_is_refused_at_once_and_in_words(tmp_path: Path) -> None:
    settings = planned((1, 1), Schedule.FLUSH, **EVALUATED)
    assert WORDS in run_ranks(2, failure_of, settings, tmp_path, deadline_s=30)[1]


@pytest.mark.parametrize("in_stages", [True, False])
def test_the_evaluation_before_the_first_step_knows_whether_all_workers_take_part(in_stages: bool) -> None:
    settings = planned((1, 1), Schedule.FLUSH, **EVALUATED) if in_stages else digits_job(**EVALUATED)
    for words in run_ranks(2, tried, settings, deadline_s=30):
        assert (WORDS in words) == in_stages
        assert bool(words) == in_stages


def test_where_all_workers_evaluate_it_is_computed(tmp_path: Path) -> None:
    job = digits_job(**EVALUATED)
    (found, _), _ = run_ranks(2, train_rank, job, tmp_path / "two", deadline_s=30)
    assert 0.0 < found.test["summed"] < 1.0
