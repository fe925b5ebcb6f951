"""Steps that are taken twice: a run that trains something else than plain PyTorch is found, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.schema.settings import (
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
    VerifySettings,
)
from plait.training.audit.schedule import is_audited, next_audited
from plait.planner.schedules.kinds import Schedule
from support.audited import differences
from support.plans import planned
from support.training import digits_job, train_rank
from support.world import run_ranks


def audited_steps(settings: TrainSettings, steps: int) -> list[int]:
    return [step + 1 for step in range(steps) if is_audited(settings, step)]


def test_steps_are_audited_at_doubling_distances_and_after_evaluations() -> None:
    assert audited_steps(digits_job(), 70) == [1, 2, 4, 8, 16, 32, 64]
    often = digits_job(evaluate=EvaluateSettings(every_steps=10))
    assert audited_steps(often, 90) == [1, 2, 4, 8, 11, 16, 21, 32, 41, 64, 81]
    rarely = digits_job(
        evaluate=EvaluateSettings(every_steps=100), verify=VerifySettings(audit="evaluations")
    )
    assert audited_steps(rarely, 1000) == [101, 201, 401, 601, 801]
    assert audited_steps(digits_job(verify=VerifySettings(audit="off")), 100) == []


@pytest.mark.parametrize("every", [None, 7, 100])
def test_the_next_audited_step_is_the_first_that_is_audited(every: int | None) -> None:
    settings = digits_job(evaluate=EvaluateSettings(every_steps=every))
    for step in range(300):
        expected = next(at for at in range(step, 1000) if is_audited(settings, at))
        assert next_audited(settings, step) == expected


RIGHT = {
    "sgd": digits_job(steps=9),
    "adamw, accumulated and clipped": digits_job(
        optimizer=OptimizerSettings("adamw", {"lr": 0.003}), accumulate=3, clip_norm=0.5, steps=5
    ),
    "shares of unlike sizes, and none": digits_job(data=DataSettings("digits", 131), steps=12),
    "an unused parameter": digits_job(model=ModelSettings("support.training:HalfUsed"), steps=3),
    "batch norm and dropout in float32": digits_job(
        model=ModelSettings("support.training:norm_net"), precision="float32", steps=9
    ),
    "bf16": digits_job(model=ModelSettings("support.training:norm_net"), precision="bf16", steps=3),
}


def train_all(rank: int, jobs: dict[str, TrainSettings], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        result, _ = train_rank(rank, job, folder / name)
        found[name] = result
    return found


def test_what_data_parallel_workers_do_is_what_plain_pytorch_does(tmp_path: Path) -> None:
    results = run_ranks(2, train_all, RIGHT, tmp_path)[0]
    for name, result in results.items():
        job = RIGHT[name]
        assert result.reason == "finished"
        assert result.audited_steps == len(audited_steps(job, job.steps or 0))
        assert result.largest_difference < (1e-12 if job.precision == "float64" else 1e-5), name


HERE = "support.audited"
WRONG = {
    "lora": (
        digits_job(model=ModelSettings(f"{HERE}:Lora"), evaluate=EvaluateSettings(every_steps=3), steps=9),
        "",
    ),
    "parts": (digits_job(model=ModelSettings(f"{HERE}:SharedAndCheckpointed"), steps=3), ""),
    "rate": (digits_job(optimizer=OptimizerSettings(f"{HERE}:OwnRate", {"lr": 0.1}), steps=3), ""),
    "noise": (digits_job(optimizer=OptimizerSettings(f"{HERE}:Noisy", {"lr": 0.1}), steps=3), ""),
}


def test_wrong(tmp_path: Path) -> None:
    results = run_ranks(2, differences, {n: j for n, (j, _) in WRONG.items()}, tmp_path)
    for name, result in results[0].items():
        print(name, result)
    assert 0


PIPELINES = {
    "flush": (2, planned((1, 1), Schedule.FLUSH, steps=5)),
    "gpipe, replicated": (3, planned((2, 1), Schedule.GPIPE, steps=5)),
    "zero-bubble": (3, planned((1, 2), Schedule.ZERO_BUBBLE, steps=5)),
    "stash": (2, planned((1, 1), Schedule.STASH, steps=5)),
    "stash, replicated": (3, planned((2, 1), Schedule.STASH, steps=5)),
    "2bw": (2, planned((1, 1), Schedule.TWO_BUFFERED, steps=5)),
    "dropout and batch norm": (2, planned((1, 1), Schedule.FLUSH, steps=5, model=ModelSettings("support.training:norm_net"), precision="float32")),
}


def test_pipes(tmp_path: Path) -> None:
    for name, (n, job) in PIPELINES.items():
        try:
            results = run_ranks(n, differences, {name: job}, tmp_path)
            print(name, *results[0].values())
        except Exception as f:
            print(name, repr(f)[-3000:])
    assert 0
