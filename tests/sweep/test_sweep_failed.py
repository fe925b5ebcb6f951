"""Trials that fail are told of and left out; the others are what they are without them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core import events as core_events
from plait.core import run_events
from plait.launcher.run_dir import RunDir
from plait.report.sweep import as_csv
from plait.schema.results import SweepResult
from plait.schema.settings import CheckpointSettings, ModelSettings, OptimizerSettings, VerifySettings
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trials.assigned_trials import AssignedTrials
from plait.training.engines.train_step import TrainStep
from support.further import but_further
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import digits_job

SGD = OptimizerSettings("sgd", {"lr": 0.1})


def job(model: str, steps: int = 5, **args: Any) -> Any:
    settings = ModelSettings(f"support.odd_models:{model}", args)
    return digits_job(steps=steps, model=settings, optimizer=SGD, checkpoint=CheckpointSettings(2))


def assert_others_as_alone(settings: SweepSettings, found: dict[str, Any], folder: Path) -> None:
    for row in found["trials"]:
        if row["state"] != "failed":
            alone, _ = trial_alone(settings, row["values"], folder / f"alone-{row['trial']}")
            assert row["state"] == "finished"
            assert row["metrics"]["loss"] == pytest.approx(alone.test["loss"], abs=1e-9)


def fused_arrays(folder: Path) -> list[tuple[int, ...]]:
    found = [recorded.event for recorded in core_events.read(RunDir(folder).events())]
    return [e.trials for e in found if isinstance(e, run_events.ArrayChanged) and e.fused]


CASES = {
    "when it is made": ("FailsWhenMade", {}, "ValueError: scale 2.0 is too large", 0),
    "at once": ("FailsInTraining", {"good": 0}, "ValueError: one step too many", 0),
    "later": ("FailsInTraining", {"good": 3}, "ValueError: one step too many", 3),
}


# Without verification, training finds what would fail "at once", too.
@pytest.mark.parametrize(
    ("name", "verify"),
    [
        ("when it is made", "first"),
        ("at once", "first"),
        ("later", "off"),
        pytest.param("later", "first", marks=pytest.mark.extended),
        *(pytest.param(name, "off", marks=pytest.mark.extended) for name in CASES if name != "later"),
    ],
)
def test_a_trial_that_fails_is_told_of_and_the_others_go_on_fused(name: str, verify: str, tmp_path: Path):
    model, args, why, step = CASES[name]
    settings = sweep_of(
        "model_args.scale=0.5,2.0,1.0,0.7", job=replace(job(model, **args), verify=VerifySettings(verify))
    )
    found = sweep_here(settings, tmp_path / "sweep")
    assert found["reason"] == "finished"
    assert [row["trial"] for row in found["trials"] if row["state"] == "failed"] == [1]
    last = found["trials"][-1]
    assert last["why"] == why
    assert last["step"] == step
    if step:
        assert "odd_models.py" in (tmp_path / "sweep" / "failures" / "trial-0001.txt").read_text()
    assert_others_as_alone(settings, found, tmp_path)
    if verify == "first" or name == "when it is made":
        assert (0, 2, 3) in fused_arrays(tmp_path / "sweep")
    table = list(csv.DictReader(as_csv(SweepResult.of_plain(found).trials).splitlines()))
    assert table[-1]["state"] == "failed"
    assert table[-1]["why"] == why
    assert table[0]["why"] == ""


@pytest.mark.usefixtures("fused_steps_pay")
@pytest.mark.parametrize("width", but_further((None, 1, 2), 1, 2))
def test_a_first_trial_that_fails_costs_the_others_nothing(width: int | None, tmp_path: Path):
    settings = sweep_of("model_args.scale=2.0,0.5,1.0", job=job("FailsWhenMade"), width=width)
    found = sweep_here(settings, tmp_path / "sweep")
    assert [row["state"] for row in found["trials"]] == ["finished", "finished", "failed"]
    assert_others_as_alone(settings, found, tmp_path)
    if width is None:
        assert (1, 2) in fused_arrays(tmp_path / "sweep")


def test_a_resumed_sweep_leaves_a_failed_trial_as_it_is(tmp_path: Path):
    settings = sweep_of("model_args.scale=0.5,2.0,1.0", job=job("FailsInTraining", good=3), width=1)
    whole = sweep_here(settings, tmp_path / "sweep")
    again = sweep_here(settings, tmp_path / "sweep", resume=True)
    assert json.dumps(again["trials"]) == json.dumps(whole["trials"])


def test_a_sweep_whose_trials_all_fail_has_failed(tmp_path: Path):
    settings = sweep_of("model_args.scale=2.0,3.0", job=job("FailsWhenMade"))
    found = sweep_here(settings, tmp_path)
    assert found["reason"] == "failed"
    assert found["best"] is None
    assert [row["why"] for row in found["trials"]] == [
        f"ValueError: scale {n} is too large" for n in ("2.0", "3.0")
    ]


# That of a population is one among others; halving waits for it, as asha does not.
@pytest.mark.parametrize("search", but_further(("halving", "asha", "pbt"), "asha", "pbt"))
def test_searches_do_without_a_trial_that_failed(search: str, tmp_path: Path):
    over = "optimizer.lr=0.01,0.02,0.05,0.1"
    settings = sweep_of(over, job=job("Net", steps=6), kind=search, least_steps=2, eta=2)
    with pytest.MonkeyPatch.context() as patch:
        fail_trial(patch, rate=0.05)
        found = sweep_here(settings, tmp_path)
    states = {row["trial"]: row["state"] for row in found["trials"]}
    assert states[2] == "failed"
    assert "finished" in states.values()
    assert found["best"]["trial"] != 2


def fail_trial(patch: pytest.MonkeyPatch, rate: float) -> None:
    """Let trials with this learning rate fail when they are built a second time, in the middle of a sweep."""

    prepare, seen = AssignedTrials._prepare, []

    def failing(self: Any, assignment: Any, state: Any) -> Any:
        if assignment["values"]["optimizer.lr"] == rate:
            seen.append(rate)
            raise ValueError("no more")
        return prepare(self, assignment, state)

    patch.setattr(AssignedTrials, "_prepare", failing)


@pytest.mark.parametrize("least", but_further((2, 1), 2))
def test_arrays_that_memory_is_too_short_for_are_made_narrower_and_a_trial_too_large_fails(
    least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    step = TrainStep.step

    def short(own: TrainStep, batches: Any, factors: Any) -> Any:
        if len(batches) > least:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(own, batches, factors)

    monkeypatch.setattr(TrainStep, "step", short)
    settings = sweep_of("optimizer.lr=0.01,0.02,0.05,0.1", job=job("Net"), width=4)
    found = sweep_here(settings, tmp_path / "sweep")
    assert_others_as_alone(settings, found, tmp_path)
    assert all(row["state"] == "finished" for row in found["trials"])
    widths = [len(trials) for trials in fused_arrays(tmp_path / "sweep")]
    assert widths == ([4, 2, 2] if least == 2 else [4, 2])


def test_a_trial_that_is_too_large_by_itself_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = TrainStep.step

    def short(own: TrainStep, *args: Any) -> Any:
        if own._settings.optimizer.options["lr"] == 0.02:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return step(own, *args)

    monkeypatch.setattr(TrainStep, "step", short)
    settings = sweep_of("optimizer.lr=0.01,0.02,0.05", job=job("Net"), width=1)
    found = sweep_here(settings, tmp_path)
    assert [row["state"] for row in found["trials"]] == ["finished", "finished", "failed"]
    assert found["trials"][-1]["why"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB"
