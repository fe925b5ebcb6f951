"""A sweep's fused trials are what they are alone, also where fusing goes wrong: verification sees to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.core import events as core_events
from plait.core import run_events
from plait.fusion.verify import Verdict
from plait.schema.settings import ModelSettings, OptimizerSettings, VerifySettings
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import digits_job

SGD = OptimizerSettings("sgd", {"lr": 0.1})


def job(model, **changes):
    return digits_job(steps=6, model=ModelSettings(f"support.odd_models:{model}"), optimizer=SGD, **changes)


def recorded(folder: Path, kind):
    found = core_events.read(folder / "events" / "rank0.jsonl")
    return [one.event for one in found if isinstance(one.event, kind)]


def assert_as_alone(settings, folder: Path):
    found = sweep_here(settings, folder / "sweep")
    for row in found["trials"]:
        alone, _ = trial_alone(settings, row["values"], folder / f"alone-{row['trial']}")
        assert row["metrics"]["loss"] == pytest.approx(alone.test["loss"], abs=1e-9), row["values"]
    return recorded(folder / "sweep", run_events.ArrayVerified)


@pytest.mark.parametrize(
    ("model", "over", "width"),
    [
        ("Activated", "model_args.act=relu,tanh", 4),
        ("Configured", "model_args.scale=0.5,2.0", 4),
        ("ScalesInput", "model_args.scale=0.5,1.0,2.0", 4),
        ("Tempered", "model_args.temperature=0.5,1.0,2.0", 4),
        ("StraightThrough", "optimizer.lr=0.05,0.1", 4),
        ("Counts", "optimizer.lr=0.01,0.02,0.05,0.1", 2),
        ("Keeps", "optimizer.lr=0.01,0.1", 2),
    ],
)
def test_odd_models_train_in_a_sweep_as_they_do_alone(model, over, width, tmp_path: Path):
    assert_as_alone(sweep_of(over, job=job(model), width=width), tmp_path)


@pytest.mark.parametrize("width", [4, None])
def test_a_module_that_cannot_be_fused_runs_trial_by_trial_and_the_events_say_so(width, tmp_path: Path):
    verified = assert_as_alone(
        sweep_of("optimizer.lr=0.05,0.1", job=job("LooksInside"), width=width), tmp_path
    )
    (event,) = verified
    assert list(event.unfused) == ["look"]
    assert "looks at a tensor's value" in event.unfused["look"]
    assert event.refused is None
    assert event.seconds > 0


def test_a_loss_that_cannot_be_fused_is_computed_trial_by_trial(tmp_path: Path):
    settings = sweep_of("optimizer.lr=0.05,0.1", job=job("Net", loss="support.odd_models:smooth_loss"))
    (event,) = assert_as_alone(settings, tmp_path)
    assert event.unfused == {}
    assert event.refused is None


def test_trials_that_nothing_can_fuse_train_one_by_one_and_the_events_say_so(tmp_path: Path, monkeypatch):
    refused = Verdict(refused="trial 1 parts from the trial alone")
    monkeypatch.setattr("plait.sweeping.engines.verified_arrays.verify_fused", lambda *_: refused)
    settings = sweep_of("optimizer.lr=0.01,0.02,0.05,0.1,0.2", job=job("Net"), width=3)
    (event,) = assert_as_alone(settings, tmp_path)
    assert event.refused == "trial 1 parts from the trial alone"
    assert not any(array.fused for array in recorded(tmp_path / "sweep", run_events.ArrayChanged))


@pytest.mark.parametrize(("mode", "times"), [("off", 0), ("first", 1), ("every_run", 2)])
def test_verification_can_be_left_out_or_asked_for_at_every_array(mode, times, tmp_path: Path):
    # Trials of one kind that begin together end together, so that the next two are an array of their own.
    settings = sweep_of(
        "optimizer.lr=0.01,0.02,0.05,0.1",
        job=replace(digits_job(steps=2), verify=VerifySettings(mode)),
        width=2,
    )
    sweep_here(settings, tmp_path)
    arrays = recorded(tmp_path, run_events.ArrayChanged)
    made = sum(
        1 for before, after in zip([None, *arrays], arrays) if after.trials and not (before and before.trials)
    )
    assert len(recorded(tmp_path, run_events.ArrayVerified)) == min(times, made)
