"""A fused trial takes steps alone, too, while a sweep runs: both are the same, or the sweep ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from plait.core import events, run_events
from plait.core.logs import kept_warnings
from plait.fusion.optim.optimizer import FusedOptimizer
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.plans.plan import Layout
from plait.schema.settings import (
    UNVERIFIED,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    SyncSettings,
    TrainSettings,
    VerifySettings,
)
from plait.sweeping.engines import audited_step
from plait.sweeping.settings import SweepSettings
from plait.training.audit.record import DifferenceError
from support.further import but_further
from support.plans import placed, planned
from support.sweeping import SweepsWhenAsked, sweep_here, sweep_of, sweep_rank
from support.training import digits_job
from support.world import run_ranks

JOBS = {
    "sgd": digits_job(steps=9),
    "adamw, accumulated and clipped": digits_job(
        optimizer=OptimizerSettings("adamw", {"lr": 0.003}), accumulate=3, clip_norm=0.5, steps=5
    ),
    "batch norm and dropout": digits_job(
        model=ModelSettings("support.training:norm_net"), precision="float32", steps=9
    ),
    "bf16": digits_job(model=ModelSettings("support.training:norm_net"), precision="bf16", steps=5),
    "batches of two sizes": digits_job(steps=5),
}


def audited(folder: Path) -> list[run_events.Audited]:
    found = [recorded.event for recorded in events.read(RunDir(folder).events())]
    return [event for event in found if isinstance(event, run_events.Audited)]


@pytest.mark.parametrize("name", JOBS)
def test_each_trial_at_first_and_then_one_in_turn_is_what_it_is_alone(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    over = ["data.batch_size=20,33"] if "sizes" in name else ["optimizer.lr=0.01,0.02,0.05"]
    result = sweep_here(sweep_of(*over, job=job), tmp_path)
    found = audited(tmp_path)
    trials = range(2 if "sizes" in name else 3)
    later = [2, 8] if job.steps == 9 else [2]
    assert [event.step for event in found] == [1 for _ in trials] + later
    assert [event.trial for event in found] == [*trials, *(turn % len(trials) for turn in range(len(later)))]
    assert all(event.differences == () for event in found)
    assert result["audited_steps"] == len(found)
    assert result["largest_difference"] < (1e-12 if job.precision == "float64" else 0.05)


def wrong_for_the_second(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """A step after which the second trial's weights are a little off."""
    done = _STEP(self, *args, **kwargs)
    for parameter in self.parameters:
        parameter.data[1] *= 1.001
    return done


_STEP = FusedOptimizer.step


def test_a_trial_that_is_not_what_it_is_alone_ends_the_sweep_or_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedOptimizer, "step", wrong_for_the_second)
    job = digits_job(steps=5, verify=VerifySettings(start="off"))
    with pytest.raises(DifferenceError, match="step 1 of trial 1 .*: the parameter or buffer .*: off"):
        sweep_here(sweep_of("optimizer.lr=0.01,0.02,0.05", job=job), tmp_path / "stops")
    warned = digits_job(steps=5, verify=VerifySettings(start="off", on_difference="warn"))
    with kept_warnings() as told:
        result = sweep_here(sweep_of("optimizer.lr=0.01,0.02,0.05", job=warned), tmp_path / "warned")
    assert result["reason"] == "finished"
    assert "step 1 of trial 1 is not what it is alone" in told[0]
    off = digits_job(steps=5, verify=UNVERIFIED)
    assert (
        sweep_here(sweep_of("optimizer.lr=0.01,0.02", job=off), tmp_path / "off").get("audited_steps") is None
    )


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fusion does not see that models differ in attributes, and all are trained as the first one."""
    for place in ("check", "join_leave"):
        monkeypatch.setattr(f"plait.fusion.{place}.different_attributes", lambda first, other: [])


def odd_job(model: str, **changes: Any) -> TrainSettings:
    factory = ModelSettings(f"support.odd_models:{model}")
    return digits_job(steps=20, model=factory, verify=VerifySettings(start="off"), **changes)


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("model", ["SlottedScale", "DrawsInPython"])
# The first trials are found in the same way as the last.
@pytest.mark.parametrize("odd", but_further((1, 2, 3), 1, 2))
def test_whichever_trial_is_trained_as_another_it_is_found_at_its_first_step(
    model: str, odd: int, tmp_path: Path
) -> None:
    scales = ",".join("2.0" if place == odd else "1.0" for place in range(4))
    with pytest.raises(DifferenceError, match=f"step 1 of trial {odd} "):
        sweep_here(sweep_of(f"model_args.scale={scales}", job=odd_job(model)), tmp_path)


@pytest.mark.usefixtures("blind")
def test_trials_that_join_are_audited_at_their_first_step(tmp_path: Path) -> None:
    settings = sweep_of("model_args.scale=1.0,2.0", "steps=9,20", job=odd_job("SlottedScale"), width=2)
    with pytest.raises(DifferenceError, match="step 1 of trial 2 "):
        sweep_here(settings, tmp_path)


@pytest.mark.usefixtures("blind")
def test_large_trials_are_audited_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audited_step, "_AT_ONCE", 1)
    settings = sweep_of("model_args.scale=1.0,1.0,1.0,2.0", job=odd_job("SlottedScale"))
    with pytest.raises(DifferenceError, match="step 4 of trial 3 "):
        sweep_here(settings, tmp_path)
    assert [(event.trial, event.step) for event in audited(tmp_path)] == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("model", ["DrawsInPython", "Counts", "Keeps"])
def test_what_a_right_model_keeps_in_python_is_no_difference(model: str, tmp_path: Path) -> None:
    with kept_warnings() as told:
        result = sweep_here(sweep_of("optimizer.lr=0.01,0.02,0.05", job=odd_job(model)), tmp_path)
    assert result["reason"] == "finished"
    assert result["largest_difference"] < 1e-12
    assert any("keeps numbers in Python" in words for words in told) == (model != "Keeps")


SUMMED = {
    "sgd": JOBS["sgd"],
    "adamw, accumulated and clipped": JOBS["adamw, accumulated and clipped"],
    # Batch norms have the statistics of a share, and dropout draws other numbers on each worker.
    "batch norm and dropout": JOBS["batch norm and dropout"],
    "local SGD": digits_job(steps=9, sync=SyncSettings("local-sgd", {"every": 2})),
    "partial reduce": digits_job(steps=9, sync=SyncSettings("partial-reduce")),
}


# Made when they are needed: they trace their models.
IN_STAGES: dict[str, Callable[[], TrainSettings]] = {
    "in stages": lambda: planned((1, 1), Schedule.ZERO_BUBBLE, 3, steps=9),
    # The third batch is a small last one of an epoch.
    "in stages, batch norm and dropout": lambda: planned(
        (1, 1),
        Schedule.FLUSH,
        3,
        model=ModelSettings("support.training:norm_net"),
        data=DataSettings("support.training:digits", 600),
        steps=9,
    ),
    # The first stage, which reads the data, is on the second worker.
    "in stages, adamw, tied and clipped": lambda: placed(
        Layout(((1,), (0,), (1,))),
        Schedule.FLUSH,
        3,
        model=ModelSettings("support.sweeping:Halves", {"tied": True, "dropout": 0.3}),
        optimizer=OptimizerSettings("adamw", {"lr": 0.003}),
        clip_norm=0.5,
        steps=9,
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of sweeps by a group of two workers, and what they came to."""
    folder = tmp_path_factory.mktemp("shared")
    sweeps = {
        name: replace(sweep_of("optimizer.lr=0.01,0.02,0.05", job=job), replicas=2)
        for name, job in SUMMED.items()
    } | {name: sweep_of("optimizer.lr=0.01,0.02,0.05", job=make()) for name, make in IN_STAGES.items()}
    return folder, SweepsWhenAsked(2, sweeps, folder)


# The others sum, and average, in the same way; norms and dropout are in stages below.
@pytest.mark.parametrize(
    "name", but_further(SUMMED, "sgd", "batch norm and dropout", "local SGD", "partial reduce")
)
def test_trials_that_two_workers_train_are_what_they_are_alone(
    name: str, shared: tuple[Path, dict[str, Any]]
) -> None:
    folder, results = shared
    result, found = results[name], audited(folder / name)
    # Workers that average go on by themselves: the second step of one may be the third of all.
    if name != "partial reduce":
        later = [(0, 2), (1, 8)] if SUMMED[name].steps == 9 else [(0, 2)]
        assert [(event.trial, event.step) for event in found] == [(trial, 1) for trial in range(3)] + later
    assert {event.trial for event in found} == {0, 1, 2}
    assert all(event.differences == () for event in found)
    is_exact = SUMMED[name].precision == "float64"
    assert result["largest_difference"] < (1e-12 if is_exact else 0.05)


# The others have stages and more.
@pytest.mark.parametrize("name", but_further(IN_STAGES, "in stages", "in stages, adamw, tied and clipped"))
def test_trials_in_stages_are_what_they_are_alone(name: str, shared: tuple[Path, dict[str, Any]]) -> None:
    """One trial at a step, the new ones first."""
    result, found = shared[1][name], audited(shared[0] / name)
    assert [(event.trial, event.step) for event in found] == [(0, 1), (1, 2), (2, 3), (0, 8)]
    assert all(event.differences == () for event in found)
    assert result["largest_difference"] < 1e-12


def sweep_with_a_mistake(rank: int, settings: SweepSettings, folder: Path) -> str:
    """The words in which a sweep ends in which one worker's second trial is a little off."""
    step = wrong_for_the_second if rank == 1 else _STEP
    with mock.patch.object(FusedOptimizer, "step", step), pytest.raises(DifferenceError) as failure:
        sweep_rank(rank, settings, folder)
    return str(failure.value)


@pytest.mark.parametrize(
    "sync",
    but_further(
        ("all-reduce", "local-sgd", "partial-reduce", "in stages"), "all-reduce", "local-sgd", "in stages"
    ),
)
def test_a_mistake_of_any_worker_ends_the_sweep_on_all_of_them(sync: str, tmp_path: Path) -> None:
    unverified: dict[str, Any] = {"steps": 5, "verify": VerifySettings(start="off")}
    if sync == "in stages":
        job = planned((1, 1), Schedule.FLUSH, 3, **unverified)
        settings = sweep_of("optimizer.lr=0.01,0.02,0.05", job=job)
    else:
        job = digits_job(sync=SyncSettings(sync), **unverified)
        settings = replace(sweep_of("optimizer.lr=0.01,0.02,0.05", job=job), replicas=2)
    told = run_ranks(2, sweep_with_a_mistake, settings, tmp_path)
    assert told[0] == told[1]
    assert re.search("step [12] of trial 1 .*: the parameter or buffer .*: off", told[0])
