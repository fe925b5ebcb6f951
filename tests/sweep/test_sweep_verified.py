"""A sweep's fused trials are what they are alone, also where fusing goes wrong: verification sees to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.core import events as core_events
from plait.core import run_events
from plait.fusion.verify import FusionReport
from plait.schema.settings import ModelSettings, OptimizerSettings, VerifySettings
from support.further import but_further
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
        # Of these two, trials join and leave below; the third differs from the fourth in what it scales.
        pytest.param("Configured", "model_args.scale=0.5,2.0", 4, marks=pytest.mark.extended),
        pytest.param("ScalesInput", "model_args.scale=0.5,1.0,2.0", 4, marks=pytest.mark.extended),
        ("Tempered", "model_args.temperature=0.5,1.0,2.0", 4),
        ("StraightThrough", "optimizer.lr=0.05,0.1", 4),
        ("Counts", "optimizer.lr=0.01,0.02,0.05,0.1", 2),
        ("Keeps", "optimizer.lr=0.01,0.1", 2),
    ],
)
def test_odd_models_train_in_a_sweep_as_they_do_alone(model, over, width, tmp_path: Path):
    assert_as_alone(sweep_of(over, job=job(model), width=width), tmp_path)


@pytest.mark.usefixtures("fused_steps_pay")
@pytest.mark.parametrize("width", [4, None])
def test_a_module_that_cannot_be_fused_runs_trial_by_trial_and_the_events_say_so(width, tmp_path: Path):
    verified = assert_as_alone(
        sweep_of("optimizer.lr=0.05,0.1", job=job("LooksInside"), width=width), tmp_path
    )
    # Where a width is measured, two trials are compared before, for what must run trial by trial.
    assert len(verified) == (1 if width else 2)
    for event in verified:
        assert list(event.unfused) == ["look"]
        assert "reads a tensor's value" in event.unfused["look"]
        assert event.refused is None
        assert event.seconds > 0


def test_a_loss_that_cannot_be_fused_is_computed_trial_by_trial(tmp_path: Path):
    settings = sweep_of("optimizer.lr=0.05,0.1", job=job("Net", loss="support.odd_models:smooth_loss"))
    (event,) = assert_as_alone(settings, tmp_path)
    assert event.unfused == {}
    assert event.refused is None


def test_trials_that_nothing_can_fuse_train_one_by_one_and_the_events_say_so(tmp_path: Path, monkeypatch):
    refused = FusionReport(refused="trial 1 differs from its plain model")
    monkeypatch.setattr("plait.sweeping.engines.verified_arrays.verify_fused", lambda *_: refused)
    settings = sweep_of("optimizer.lr=0.01,0.02,0.05,0.1,0.2", job=job("Net"), width=3)
    (event,) = assert_as_alone(settings, tmp_path)
    assert event.refused == "trial 1 differs from its plain model"
    assert not any(array.fused for array in recorded(tmp_path / "sweep", run_events.ArrayChanged))


@pytest.mark.parametrize(("mode", "times"), [("off", 0), ("first", 2), ("every_run", 3)])
def test_each_trial_is_compared_once_also_one_that_joins_or_whenever_it_enters(mode, times, tmp_path: Path):
    # Three begin and one joins; the best then goes on from its checkpoint in an array of its own.
    settings = sweep_of(
        "optimizer.lr=0.01,0.02,0.05,0.1",
        job=replace(digits_job(steps=4), verify=VerifySettings(mode)),
        width=3,
        kind="halving",
        least_steps=2,
        eta=4,
    )
    sweep_here(settings, tmp_path)
    assert len(recorded(tmp_path, run_events.ArrayVerified)) == times


@pytest.fixture
def blind(monkeypatch):
    """Fusion does not see that models differ in attributes; verification alone can."""
    for place in ("check", "join_leave"):
        monkeypatch.setattr(f"plait.fusion.{place}.different_attributes", lambda first, other: [])


@pytest.mark.parametrize(
    "model",
    but_further(
        ("SlottedScale", "ClassOfItsOwn", "WrappedForward", "AfterAccumulation", "FrozenNorm"),
        *("ClassOfItsOwn", "WrappedForward", "FrozenNorm"),
    ),
)
def test_trials_that_begin_or_join_are_what_plait_train_makes_of_them(model, tmp_path: Path):
    assert_as_alone(sweep_of("model_args.scale=0.5,2.0", "steps=3,6", job=job(model), width=2), tmp_path)


@pytest.mark.parametrize("model", but_further(("SlottedScale", "Configured"), "Configured"))
def test_a_trial_that_joins_and_would_be_trained_as_another_waits_for_its_own_array(
    model, tmp_path: Path, blind: None
):
    settings = sweep_of("model_args.scale=0.5,2.0", "steps=3,6", job=job(model), width=2)
    assert_as_alone(settings, tmp_path)
    arrays = [event for event in recorded(tmp_path / "sweep", run_events.ArrayChanged) if event.trials]
    assert [event.trials for event in arrays][:2] == [(0, 1), (1,)]
    assert "others wait until it has ended: with them" in arrays[1].why
    assert (2, 3) in [event.trials for event in arrays]


@pytest.mark.usefixtures("fused_steps_pay")
def test_measuring_the_width_leaves_no_tensors_without_memory_behind(tmp_path: Path):
    # Neither in the caches of the model's code nor in ours, where weights of microbatches are kept.
    settings = sweep_of("optimizer.lr=0.05,0.1", job=job("CachesTensors", accumulate=2), width=None)
    assert_as_alone(settings, tmp_path)
    fused = [array.fused for array in recorded(tmp_path / "sweep", run_events.ArrayChanged) if array.trials]
    assert fused == [True]
