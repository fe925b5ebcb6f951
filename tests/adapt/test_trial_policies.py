"""Policies in a sweep: each trial has its own, and trains as the same trial does alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.adapt.changes import BatchSizeChange, WorkersChange
from plait.core import events
from plait.core.errors import JobError, PlaitError
from plait.core.run_events import ArrayVerified, Changed, Signals, TrialReached
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    CheckpointSettings,
    LrScheduleSettings,
    ModelSettings,
    OptimizerSettings,
    PolicySettings,
    SyncSettings,
    TrainSettings,
)
from plait.sweeping.search.values import check
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import check_key, with_values
from plait.training.change.batch_size import BatchSize
from plait.training.checkpoint import list_checkpoints, load
from support.averaging import job_store
from support.further import but_further
from support.plans import in_stages, straight_layout
from support.sweeping import same_table, sweep_here, sweep_of, sweep_rank, sweeps_rank, trial_alone
from support.training import digits_job, train_here, train_rank, unverified_job
from support.world import run_ranks

RATES = "optimizer.lr=0.02,0.05,0.1"
# Of 1438 digits: 23 steps of 64 an epoch.
TABLE = PolicySettings("steps", {"changes": {2: {"batch_size": 128, "lr_factor": 1.5}}})


def below(signals: list[Signals], loss: float) -> list[BatchSizeChange]:
    """Larger batches once the loss is low, which trials with unlike learning rates see at unlike steps."""
    now = signals[-1]
    assert now.loss is not None
    return [BatchSizeChange(96, 1.5)] if now.batch_size == 64 and now.loss < loss else []


def wrong(signals: list[Signals]) -> list[Any]:
    """Requests what no trial can do, of the one whose loss falls fast."""
    loss = signals[-1].loss
    return [WorkersChange(2)] if loss is not None and loss < 1.0 else []


def changed_net() -> nn.Module:
    """A model that fused trials with batches of unlike sizes cannot have: padding would change averages."""
    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(144, 10))


def job(*policies: PolicySettings, **changes: Any) -> TrainSettings:
    """One epoch, whose steps and whose schedule change with the batches."""
    values = {"steps": None, "epochs": 1, "lr_schedule": LrScheduleSettings("cosine"), "adapt": policies}
    return unverified_job(**{**values, **changes})


def recorded(folder: Path, kind: type) -> list[Any]:
    return [r.event for r in events.read(RunDir(folder).events()) if isinstance(r.event, kind)]


BY_LOSS = PolicySettings("test_trial_policies:below", {"loss": 1.7})
BY_NOISE = PolicySettings(
    "batch-size", {"most": 200, "every_steps": 4, "threshold": 0.1, "lr": "adascale", "factor": 1.5}
)


@pytest.mark.parametrize(
    ("policy", "width"), [(BY_LOSS, 3), (BY_NOISE, 3), pytest.param(BY_NOISE, 1, marks=pytest.mark.extended)]
)
def test_a_trial_changes_and_trains_as_it_does_alone(policy: PolicySettings, width: int, tmp_path: Path):
    sweep = sweep_of(RATES, width=width, job=job(policy, accumulate=2))
    result = sweep_here(sweep, tmp_path / "sweep")
    changes = recorded(tmp_path / "sweep", Changed)
    assert len({str([(c.step, c.change) for c in changes if c.trial == t]) for t in range(3)}) == 3
    for trial in result["trials"]:
        folder = tmp_path / str(trial["trial"])
        alone, _ = trial_alone(sweep, trial["values"], folder)
        for found, expected in zip(
            [each for each in changes if each.trial == trial["trial"]], recorded(folder, Changed), strict=True
        ):
            assert (found.step, found.by) == (expected.step, expected.by)
            assert found.change == pytest.approx(expected.change)
        assert trial["step"] == alone.step
        assert trial["metrics"] == pytest.approx(alone.test, abs=1e-9)


def test_the_first_worker_of_a_group_asks_for_all(tmp_path: Path):
    """Two workers sum the gradients of each array, or average its weights after every step."""
    one = sweep_of(RATES, job=job(BY_LOSS, steps=30, epochs=None, optimizer=OptimizerSettings("sgd", {})))
    averaged = replace(one, train=replace(one.train, sync=SyncSettings("local-sgd", {"every": 1})))
    sweeps = {"sums": replace(one, replicas=2), "averages": replace(averaged, replicas=2)}
    found = run_ranks(2, sweeps_rank, sweeps, tmp_path)[0]
    alone = sweep_here(one, tmp_path / "one")
    expected = [(e.trial, e.step, e.change) for e in recorded(tmp_path / "one", Changed)]
    assert same_table(alone, found["sums"])
    assert [(e.trial, e.step, e.change) for e in recorded(tmp_path / "sums", Changed)] == expected
    # Workers that average come together, and are asked, after every 25th step.
    assert {e.step for e in recorded(tmp_path / "averages", Changed)} == {25}


def saved_signals(folder: Path) -> list[Any]:
    """The signals in the checkpoint of a sweep's best trial."""
    (path,) = list_checkpoints(RunDir(folder).checkpoints)
    return list(load(path).progress["signals"]["newest"])


# Halving has rungs, as asha has, and a whole table, as a grid.
@pytest.mark.parametrize("search", but_further(("grid", "halving", "asha"), "grid", "asha"))
def test_goals_are_counted_anew_also_in_a_sweep_that_was_stopped(search: str, tmp_path: Path):
    """Goals after 3, 9 and 23 steps of 64; from the second step on, a step has 128 samples."""
    saved = CheckpointSettings(every_steps=3)
    sweep = sweep_of(RATES, job=job(TABLE, BY_NOISE, accumulate=2, checkpoint=saved), kind=search)
    only_table = replace(sweep, train=replace(sweep.train, adapt=(TABLE,)))
    sweep_here(only_table, tmp_path / "table")
    reached = {event.step for event in recorded(tmp_path / "table", TrialReached)}
    assert reached == ({13} if search == "grid" else {3, 6, 13})
    # A table needs no signals: the losses of a step are not read.
    assert saved_signals(tmp_path / "table") == []
    whole = sweep_here(sweep, tmp_path / "whole")
    assert saved_signals(tmp_path / "whole")
    stop = tmp_path / "cut" / "trials"
    assert sweep_here(sweep, tmp_path / "cut", stop_file=stop)["reason"] == "stopped"
    resumed = sweep_here(sweep, tmp_path / "cut", resume=True)
    assert same_table(whole, resumed)
    assert max(each["step"] for each in whole["trials"]) < 23


def by_number(signals: list[Signals]) -> list[BatchSizeChange]:
    """Larger batches after every fifth of the signals that it has seen."""
    return [BatchSizeChange(signals[-1].batch_size + 8)] if len(signals) % 5 == 0 else []


def test_policies_decide_by_the_signals_of_before_when_a_trial_goes_on_from_a_checkpoint(tmp_path: Path):
    """Halving saves trials after 3 and 9 steps; a run is resumed after 5, at which it is to change."""
    policy = PolicySettings("test_trial_policies:by_number")
    common: dict[str, Any] = {"epochs": None, "lr_schedule": LrScheduleSettings()}
    sweep = sweep_of(RATES, job=job(policy, steps=20, **common), kind="halving", least_steps=3)
    best = sweep_here(sweep, tmp_path / "sweep")["best"]
    alone, weights = trial_alone(sweep, best["values"], tmp_path / "alone")
    expected = [(event.step, event.change) for event in recorded(tmp_path / "alone", Changed)]
    assert len(expected) == 3
    changes = [event for event in recorded(tmp_path / "sweep", Changed) if event.trial == best["trial"]]
    assert [(event.step, event.change) for event in changes] == expected
    assert best["metrics"] == pytest.approx(alone.test, abs=1e-9)
    first = expected[0][0]
    train_here(replace(with_values(sweep.train, best["values"]), steps=first), tmp_path / "resumed")
    _, resumed = train_here(with_values(sweep.train, best["values"]), tmp_path / "resumed", resume=True)
    assert [(e.step, e.change) for e in recorded(tmp_path / "resumed", Changed)] == expected
    assert all(torch.equal(value, weights[name]) for name, value in resumed.items())


def test_steps_of_the_schedule_lie_at_steps_of_training():
    batch = BatchSize(60, 60).changed(BatchSizeChange(100), 3, by_samples=True)
    assert [batch.step_at(step) for step in (3, 4, 5, 8, 9, 13)] == [3, 4, 5, 6, 7, 9]
    fewer = batch.changed(BatchSizeChange(30), 6, by_samples=True)
    assert [fewer.step_at(step) for step in (8, 9, 10)] == [6, 8, 10]
    assert BatchSize(60, 60).changed(BatchSizeChange(100), 3, by_samples=False).step_at(7) == 7


def test_a_trial_whose_policy_fails_ends_and_the_others_go_on(tmp_path: Path):
    policy = PolicySettings("test_trial_policies:wrong")
    sweep = sweep_of("optimizer.lr=0.0001,0.05,0.1", job=unverified_job(steps=12, adapt=(policy,)))
    table = {each["trial"]: each for each in sweep_here(sweep, tmp_path)["trials"]}
    assert [table[number]["state"] for number in range(3)] == ["finished", "failed", "failed"]
    assert "a trial of a sweep cannot change its number of workers; leave" in table[2]["why"]


def test_trials_that_cannot_have_unlike_batches_are_not_fused(tmp_path: Path):
    """Known before the first step: verification takes unlike batches where policies may make them so."""
    model = ModelSettings("test_trial_policies:changed_net")
    plain = digits_job(steps=3, model=model)
    for name, adapt in (("plain", ()), ("adapted", (TABLE,))):
        sweep = sweep_of("optimizer.lr=0.1,0.2", job=replace(plain, adapt=adapt))
        assert sweep_here(sweep, tmp_path / name)["reason"] == "finished"
    (verified,) = recorded(tmp_path / "plain", ArrayVerified)
    assert not verified.unfused
    (verified,) = recorded(tmp_path / "adapted", ArrayVerified)
    assert "batches of one size" in verified.unfused["1"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (PolicySettings("plan"), r"adapt\[0\].kind: found plan, but the stages of an array"),
        (PolicySettings("sync"), "found sync, but the workers of an array train all its trials with one"),
        (PolicySettings("topology"), "found topology, but the workers of an array sum the gradients of all"),
        (PolicySettings("workers", {"most": 3}), "the workers are the sweep's; with parallel.elastic, plait"),
        (PolicySettings("steps", {"changes": {5: {"workers": 2}}}), r"adapt\[0\].changes.5: found workers"),
        (PolicySettings("batch-size", {"mst": 3}), "did you mean 'most'"),
    ],
)
def test_policies_that_change_more_than_a_trial_are_refused(policy: PolicySettings, words: str):
    with pytest.raises(PlaitError, match=words):
        check(sweep_of(RATES, job=job(policy)))


# What trials in stages decide by is in test_trial_signals.py; that they decide by it, above.
@pytest.mark.extended
def test_in_stages_trials_decide_by_the_noise_of_their_whole_gradients(tmp_path: Path):
    """As in a run, stages are asked after every 25th step, and nothing changes after the first time."""
    whole = job(BY_NOISE, epochs=None, steps=53)
    staged = in_stages(whole, straight_layout((1, 1)), Schedule.FLUSH, microbatches=2)
    sweep = sweep_of("optimizer.lr=0.02,0.1", job=staged)
    result = run_ranks(2, sweep_rank, sweep, tmp_path / "sweep")[0]
    best = result["best"]
    alone, _ = run_ranks(2, train_rank, with_values(staged, best["values"]), tmp_path / "alone")[0]
    changes = {each.trial: each for each in recorded(tmp_path / "sweep", Changed)}
    (expected,) = recorded(tmp_path / "alone", Changed)
    assert changes.keys() == {0, 1}
    assert changes[0].change != changes[1].change
    assert changes[best["trial"]].change == pytest.approx(expected.change, rel=1e-9)
    assert changes[best["trial"]].step == expected.step == 50
    assert best["metrics"] == pytest.approx(alone.test, abs=1e-9)


def sweep_and_one_alone(rank: int, sweep: SweepSettings, folder: Path, address: str) -> dict[str, Any]:
    """A sweep by all workers as one group, and its first trial as a run of these workers."""
    result = sweep_rank(rank, sweep, folder / "sweep")
    first = {dimension.key: dimension.values[0] for dimension in sweep.over}
    train_rank(rank, with_values(sweep.train, first), folder / "alone", address=address)
    return result


# All workers average gradients after each step: a group, of which a share is a part.
GROUPS = {"minimum": 2, "patience": 1000.0, "every": 1, "average": "gradients"}


# As above; what workers that average measure is in test_signals.py.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("sync", "microbatches"),
    [(SyncSettings("local-sgd", {"every": 3}), 2), (SyncSettings("partial-reduce", GROUPS), 1)],
)
def test_pipelines_that_average_decide_as_whole_models_that_do(
    sync: SyncSettings, microbatches: int, tmp_path: Path
):
    """Each trial of an array by its own noise, which is that of all workers, as in a run.

    Policies are asked after every 25th step, at which curves have their points, too.
    """
    whole = job(BY_NOISE, epochs=None, steps=53, log_every_steps=25, sync=sync)
    pipelines = in_stages(whole, straight_layout((2, 2)), Schedule.FLUSH, 2 * microbatches)
    jobs = {"whole": (2, replace(whole, accumulate=microbatches)), "pipelines": (4, pipelines)}
    tables, changes, signals = {}, {}, {}
    for name, (ranks, train) in jobs.items():
        folder, replicas = tmp_path / name, 1 if train.in_stages else ranks
        sweep = replace(sweep_of("optimizer.lr=0.02,0.1", job=train), replicas=replicas)
        with job_store() as address:
            tables[name] = run_ranks(ranks, sweep_and_one_alone, sweep, folder, address)[0]
        changes[name] = {each.trial: each.change for each in recorded(folder / "sweep", Changed)}
        (alone,) = recorded(folder / "alone", Changed)
        assert changes[name].keys() == {0, 1}
        assert changes[name][0] == pytest.approx(alone.change, rel=1e-8)
        assert changes[name][0] != changes[name][1]
        found = recorded(folder / "alone", Signals)
        signals[name] = [(s.step, s.loss, s.noise_scale, s.variance, s.squared_norm) for s in found]
    assert same_table(tables["whole"], tables["pipelines"], 1e-8)
    assert [each[0] for each in signals["whole"]] == [25, 50]
    for ours, theirs in zip(signals["pipelines"], signals["whole"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-8)
    for trial, change in changes["whole"].items():
        assert changes["pipelines"][trial] == pytest.approx(change, rel=1e-8)


def test_policies_are_not_swept_over():
    with pytest.raises(JobError, match="it belongs to the sweep as a whole; set it with --set adapt"):
        check_key("adapt")
