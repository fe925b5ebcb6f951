"""Arrays in stages: each trial is what one worker makes of it with as many microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.core.errors import InputError, JobError, PlaitError
from plait.fusion.errors import FusionError
from plait.jobs.sweep import make_sweep
from plait.launcher.run_dir import RunDir
from plait.pipeline.layout import arrange
from plait.planner.schedules.in_flight import Schedule
from plait.schema.job import make_job
from plait.schema.plans.plan import Layout
from plait.schema.settings import (
    UNVERIFIED,
    CheckpointSettings,
    EvaluateSettings,
    GroupSettings,
    ModelSettings,
    OptimizerSettings,
    PipelineSettings,
    PlanRequest,
    SyncSettings,
)
from plait.sweeping.array_workers import check_worker_groups
from plait.sweeping.datasets import DataSets
from plait.sweeping.engines.array_stages import FusedStages
from plait.sweeping.engines.verified_stages import prepare_trials
from plait.sweeping.search.space import combinations
from plait.sweeping.search.values import check
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from plait.sweeping.trials.assigned_trials import make_entry
from plait.training import checkpoint as checkpoints
from plait.training.worker_group import WorkerGroup
from support.plans import placed, straight_layout
from support.sweeping import (
    SweepsWhenAsked,
    killed_sweep,
    same_table,
    stop_and_go_on,
    sweep_here,
    sweep_of,
    sweep_rank,
    trial_alone,
)
from support.training import largest_difference, train_rank, unverified_job
from support.world import run_ranks

# On a busy machine, tracing takes long.
pytestmark = pytest.mark.timeout(240)
MICROBATCHES = 3
STEPS = 7
# Some of the group's parameters lie in each of the two stages.
GROUP = GroupSettings("first.*|*.bias", {"weight_decay": 0.0, "lr": 0.02})
ADAM = OptimizerSettings("adamw", {"lr": 0.01, "weight_decay": 0.1}, (GROUP,))


class Keeps(nn.Module):
    """A model with a value of its own that is neither a parameter nor a buffer."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(64, 8), nn.Dropout(number / 4), nn.Linear(8, 10)
        self.weights = [self.first.weight]
        self.calls = 0
        values = {
            "tensor": torch.tensor([float(number)]),
            "tuple": (1, (number, 2)),
            "list": [torch.tensor(1.0), torch.tensor(number)],
            "bool": number == 1,
            "int": number,
            "str": f"number {number}",
            "dtype": torch.float64 if number else torch.float32,
            "float or none": None if number else 0.5,
            "same": (1, "same", torch.ones(2)),
        }
        self.kept = values[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.drop(self.first(x.flatten(1))).relu())


ADAMAX = OptimizerSettings("adamax", {"lr": 0.01})
HALVES = ModelSettings("support.sweeping:Halves")
TIED = ModelSettings("support.sweeping:Halves", {"tied": True})
HALF: dict[str, Any] = {
    "precision": "fp16",
    "model": ModelSettings("plait.workloads.mlp:mlp", {"inputs": 64, "hidden": [32, 32]}),
    "loss": "support.training:large_loss",
    "verify": UNVERIFIED,
}
NORM = ModelSettings("support.sweeping:norm_net")
DROP = ModelSettings("support.training:small_net", {"dropout": 0.4})
DUE = {"evaluate": EvaluateSettings(every_steps=6), "checkpoint": CheckpointSettings(every_steps=5)}


# Of each layout, schedule and kind of model, whose layers do not depend on its arguments: tracing takes a
# while.
_PLANS: dict[tuple[Layout, Schedule, str], PipelineSettings] = {}
# The first worker has the first and the last of three stages, and in the second layout half of the first.
SEVERAL = Layout(((0,), (1,), (0,)))
SEVERAL_REPLICATED = Layout(((0, 2), (1,), (0,)))


def in_stages(
    *over: str,
    replicas: tuple[int, ...] | Layout = (1, 1),
    schedule: Schedule = Schedule.FLUSH,
    width: int | None = 3,
    recompute: tuple[int, ...] = (),
    **options: Any,
) -> SweepSettings:
    """A sweep whose arrays lie in stages, by default in two, with `replicas` workers each, or as it says."""
    layout = replicas if isinstance(replicas, Layout) else straight_layout(replicas)
    search = {name: options.pop(name) for name in ("kind", "trials", "least_steps") if name in options}
    model = options.get("model")
    key = layout, schedule, model.factory if model else ""
    if key not in _PLANS:
        _PLANS[key] = placed(layout, schedule, MICROBATCHES, **options).stages
    pipeline = replace(_PLANS[key], recompute=recompute)
    job = unverified_job(steps=STEPS, pipeline=pipeline, **options)
    return sweep_of(*over, job=job, width=width, **search)


def on_one(settings: SweepSettings) -> SweepSettings:
    """The same on one worker that takes as many microbatches a step."""
    train = replace(settings.train, pipeline=None, accumulate=MICROBATCHES)
    return replace(settings, train=train, replicas=1, width=settings.width or 3)


@functools.cache
def sweeps() -> dict[str, SweepSettings]:
    """Sweeps on two workers. Made when they are needed: they trace their models."""
    return {
        "flush": in_stages("data.batch_size=2,64", "clip_norm=null,0.3", optimizer=ADAM, model=HALVES),
        "gpipe": in_stages(
            "data.batch_size=2,64", "optimizer.lr=0.01,0.1", schedule=Schedule.GPIPE, model=NORM
        ),
        "tied": in_stages("data.batch_size=2,64", "clip_norm=null,0.3", optimizer=ADAM, model=TIED),
        "several stages": in_stages(
            "data.batch_size=2,64",
            "model_args.dropout=0.1,0.3",
            replicas=SEVERAL,
            optimizer=ADAM,
            model=TIED,
            schedule=Schedule.INTERLEAVED,
            recompute=(0, 2),
        ),
        "zero-bubble": in_stages("clip_norm=0.3,0.1", "seed=0,1", schedule=Schedule.ZERO_BUBBLE, width=None),
        "twice named": in_stages("optimizer.lr=0.01,0.1", model=ModelSettings("support.training:TwiceNamed")),
        "pbt": in_stages("optimizer.lr=log:1e-3:0.3", kind="pbt", trials=5, least_steps=8, **DUE),
        "dropout": in_stages("model_args.dropout=0.2,0.4", "optimizer.lr=0.01,0.1", model=DROP, **DUE),
        "recompute": in_stages("optimizer.lr=0.01,0.1", "data.batch_size=2,64", model=NORM, recompute=(0, 1)),
        "not fused": in_stages("clip_norm=null,0.3", optimizer=ADAMAX),
        "fp16": in_stages("optimizer.lr=0.01,0.02", **HALF),
        "fp16 one by one": in_stages("optimizer.lr=0.01,0.02", width=1, **HALF),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the sweeps above, and what they came to on two workers."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, SweepsWhenAsked(2, sweeps(), folder)


def replicated(*over: str, **options: Any) -> SweepSettings:
    return in_stages(*over, replicas=(2, 1), **{"verify": UNVERIFIED, **options})


@functools.cache
def sweeps_of_three() -> dict[str, SweepSettings]:
    """Sweeps whose first stage has two workers."""
    return {
        "flush": replicated("data.batch_size=2,64", "clip_norm=null,0.3", optimizer=ADAM, model=HALVES),
        "several stages": in_stages(
            "data.batch_size=2,64",
            "clip_norm=null,0.3",
            replicas=SEVERAL_REPLICATED,
            optimizer=ADAM,
            model=TIED,
        ),
        "gpipe": replicated("data.batch_size=1,64", "optimizer.lr=0.01,0.1", schedule=Schedule.GPIPE),
        "recompute": replicated("data.batch_size=2,64", "clip_norm=0.3,0.1", recompute=(0, 1)),
        "pbt": replicated("optimizer.lr=log:1e-3:0.3", kind="pbt", trials=5, least_steps=8, **DUE),
        "not fused": replicated("clip_norm=null,0.3", optimizer=ADAMAX),
        "dropout": replicated("model_args.dropout=0.2,0.4", "optimizer.lr=0.01,0.1", model=DROP, **DUE),
        "norm": replicated("data.batch_size=2,600", width=2, model=NORM),
    }


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the sweeps above, and what they came to on three workers."""
    folder = tmp_path_factory.mktemp("trio")
    return folder, SweepsWhenAsked(3, sweeps_of_three(), folder)


def check_as_on_one(settings: SweepSettings, found: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Check that a sweep came to what it comes to on one worker, and its best trial to what it does alone."""
    one = on_one(settings)
    assert same_table(sweep_here(one, tmp_path / "one"), found, tolerance=1e-10)
    draws = any(dimension.key == "model_args.dropout" for dimension in settings.over)
    # Trials that are not fused draw other random numbers.
    if settings.search.kind != "pbt" and not draws:
        _, weights = trial_alone(one, found["best"]["values"], tmp_path / "alone")
        assert largest_difference(best_of(folder).model, weights) < 1e-10


def best_of(folder: Path) -> checkpoints.Checkpoint:
    (path,) = checkpoints.list_checkpoints(RunDir(folder).checkpoints)
    return checkpoints.load(path)


FURTHER = ("flush", "gpipe", "tied", "zero-bubble", "recompute", "twice named")


@pytest.mark.parametrize(
    "name",
    [
        # A weight is tied, and stages recompute, in "several stages", too; zero-bubble is the schedule of a
        # row of tests/test_engines.py; a run has two names for a layer in training/test_pipeline_training.py.
        *(pytest.param(n, marks=pytest.mark.extended) for n in FURTHER),
        # Trials that are not fused are in test_sweep_stages_verified.py, dropout is in test_sweep_audit.py.
        *(pytest.param(n, marks=pytest.mark.extended) for n in ("dropout", "not fused")),
        "several stages",
        "pbt",
    ],
)
def test_a_trial_in_two_stages_equals_that_on_one_worker(
    name: str, pair: tuple[Path, dict[str, Any]], tmp_path: Path
):
    folder, found = pair
    check_as_on_one(sweeps()[name], found[name], folder / name, tmp_path)


# tests/test_engines.py has a row in such stages, and the others in two stages are above.
@pytest.mark.extended
@pytest.mark.parametrize("name", ["flush", "several stages", "gpipe", "pbt", "recompute", "not fused"])
def test_a_trial_in_replicated_stages_equals_that_on_one_worker(
    name: str, trio: tuple[Path, dict[str, Any]], tmp_path: Path
):
    folder, found = trio
    check_as_on_one(sweeps_of_three()[name], found[name], folder / name, tmp_path)


def test_replicas_of_a_stage_draw_what_its_only_worker_would_draw(
    pair: tuple[Path, dict[str, Any]], trio: tuple[Path, dict[str, Any]]
):
    assert same_table(pair[1]["dropout"], trio[1]["dropout"], tolerance=1e-10)


# Those of a run are in training/test_running_statistics.py, those of whole models in test_sweep_replicas.py.
@pytest.mark.extended
def test_running_statistics_of_replicas_are_those_of_a_run_with_the_same_plan(
    trio: tuple[Path, dict[str, Any]], tmp_path: Path
):
    """Also where the replicas have unlike shares of the trials' samples."""
    settings, best, small = sweeps_of_three()["norm"], trio[1]["norm"]["best"], trio[1]["norm"]["trials"][-1]
    assert small["values"]["data.batch_size"] == 2
    assert best["trial"] != small["trial"]
    for name, trial in (("best", best), ("small", small)):
        own = with_values(settings.train, trial["values"])
        run, _ = run_ranks(3, train_rank, own, tmp_path / name)[0]
        assert trial["metrics"] == pytest.approx(run.test, abs=1e-10)
    alone = best_of(tmp_path / "best").model
    assert largest_difference(best_of(trio[0] / "norm").model, alone) < 1e-10


# Runs in stages have it in training/test_pipeline_training.py, fused trials on one worker in test_sweep.py.
@pytest.mark.extended
@pytest.mark.parametrize("name", ["fp16", "fp16 one by one"])
def test_each_trial_in_half_precision_has_one_loss_scale_in_all_stages(
    name: str, pair: tuple[Path, dict[str, Any]], tmp_path: Path
):
    """The first scales overflow: all stages leave out the same updates of a trial."""
    own = with_values(on_one(sweeps()[name]).train, pair[1][name]["best"]["values"])
    # In a process like theirs: what fp16 rounds to may depend on what a process has done before.
    run_ranks(1, train_rank, own, tmp_path)
    found, expected = best_of(pair[0] / name), best_of(tmp_path)
    assert 1.0 < expected.progress["loss_scale"]["scale"] < 65536.0
    assert found.progress["loss_scale"] == expected.progress["loss_scale"]
    assert largest_difference(found.model, expected.model) < 1e-4


# One that is stopped goes on in tests/test_engines.py, a sweep that is killed in test_sweep_resume.py.
@pytest.mark.extended
def test_a_killed_pipeline_goes_on_with_nothing_lost_and_the_same_dropout(tmp_path: Path):
    settings = in_stages("model_args.dropout=0.2,0.4", "optimizer.lr=0.01,0.1", model=DROP, **DUE)
    whole = run_ranks(2, sweep_rank, settings, tmp_path / "whole")[0]
    folder = killed_sweep(2, settings, tmp_path, 0)
    again = run_ranks(2, sweep_rank, settings, folder, resume=True)[0]
    assert same_table(whole, again, tolerance=1e-10)


@pytest.mark.extended
def test_a_pipeline_that_was_stopped_goes_on_where_it_was(tmp_path: Path):
    settings = in_stages("optimizer.lr=0.01,0.1", **DUE)
    stopped, saved, found = run_ranks(2, stop_and_go_on, settings, tmp_path / "two")[0]
    assert stopped["reason"] == "stopped"
    assert saved[0] == "step-000000005"
    assert same_table(sweep_here(on_one(settings), tmp_path / "one"), found, tolerance=1e-10)


@pytest.mark.extended
def test_replicas_that_were_stopped_go_on_with_the_same_dropout(
    trio: tuple[Path, dict[str, Any]], tmp_path: Path
):
    settings = sweeps_of_three()["dropout"]
    stopped, _, found = run_ranks(3, stop_and_go_on, settings, tmp_path, deadline_s=120)[0]
    assert stopped["reason"] == "stopped"
    assert same_table(trio[1]["dropout"], found, tolerance=1e-10)


# Two groups of replicas do in test_sweep_replicas.py.
@pytest.mark.extended
def test_two_pipelines_take_their_arrays_from_one_queue(tmp_path: Path):
    settings = in_stages("optimizer.lr=log:1e-3:0.3:3", "seed=0,1", width=2)
    found = run_ranks(4, sweep_rank, settings, tmp_path / "four")[0]
    assert same_table(sweep_here(on_one(settings), tmp_path / "one"), found, tolerance=1e-10)


@pytest.mark.extended
def test_two_groups_of_replicas_take_their_arrays_from_one_queue(tmp_path: Path):
    whole = in_stages("optimizer.lr=log:1e-3:0.3:3", "seed=0,1", replicas=(1,), width=2)
    settings = replace(whole, replicas=2)
    found = run_ranks(4, sweep_rank, settings, tmp_path / "four")[0]
    assert same_table(sweep_here(on_one(settings), tmp_path / "one"), found, tolerance=1e-10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: in_stages("seed=0,1", schedule=Schedule.STASH),
            r"parallel.schedule: found stash, expected one that drains \(flush, gpipe, interleaved,",
        ),
        (
            lambda: replace(in_stages("seed=0,1"), replicas=4),
            "--replicas: found 4 for a plan that cuts a batch into 3 microbatches, which 4 pipelines share",
        ),
        (
            lambda: in_stages("seed=0,1", accumulate=2),
            "accumulate: a pipeline accumulates by itself",
        ),
        (lambda: in_stages("accumulate=1,2"), "accumulate: a pipeline accumulates by itself"),
        (
            lambda: in_stages("seed=0,1", sync=SyncSettings("partial-reduce")),
            r"parallel.plan: found stages with \[1, 1\] workers; pipelines side by side need as many",
        ),
        (lambda: in_stages("seed=0,1", recompute=(2,)), "parallel.recompute: found stage 2, expected"),
    ],
)
def test_what_arrays_in_stages_cannot_do_is_refused(make: Callable[[], SweepSettings], message: str):
    settings = make()
    with pytest.raises(InputError, match=message):
        check(settings)


def test_depths_that_would_have_a_stage_wait_for_ever_are_refused():
    settings = in_stages("seed=0,1")
    assert settings.train.pipeline is not None
    deep = replace(settings.train.pipeline, depths={0: 1, 1: 2})
    with pytest.raises(InputError, match="would wait for ever; give stage 0 at least 2"):
        check(replace(settings, train=replace(settings.train, pipeline=deep)))


def test_a_plan_that_does_not_divide_the_workers_is_refused():
    with pytest.raises(
        InputError, match="--plan: found a plan for 2 workers, which do not divide the 3 workers; use -np 2"
    ):
        check_worker_groups(in_stages("seed=0,1"), 3)
    with pytest.raises(InputError, match="--plan: found a plan for 2 times 2 workers, .* use -np 4"):
        check_worker_groups(replace(in_stages("seed=0,1"), replicas=2), 6)


class MeasuredError(Exception):
    """The job would be measured now."""


@pytest.mark.parametrize(
    ("schedule", "message"),
    [(None, "flush"), ("gpipe", "gpipe"), ("stash", "parallel.schedule: found stash, expected one that")],
)
def test_a_plan_to_be_measured_has_a_schedule_that_drains_or_is_refused_before(
    schedule: str | None, message: str, monkeypatch: pytest.MonkeyPatch
):
    def measure(settings: Any, placement: Any, asked: PlanRequest) -> Any:
        raise MeasuredError(asked.schedule)

    monkeypatch.setattr("plait.measure.auto_plan.planned", measure)
    job = make_job(
        {
            "name": "small",
            "model": "support.training:small_net",
            "data": {"kind": "digits", "batch_size": 8},
            "loss": "cross-entropy",
            "optimizer": {"kind": "sgd", "lr": 0.1},
            "steps": 2,
            "parallel": {"plan": "auto", "workers": 2, "schedule": schedule},
        }
    )
    with pytest.raises(JobError if schedule == "stash" else MeasuredError, match=message):
        make_sweep(job, ["seed=0,1"], width=2)


def test_width_one_is_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **options: Any) -> Any:
        raise FusionError("cannot be fused")

    monkeypatch.setattr("plait.sweeping.worker.SweepLoop", refuse)
    with pytest.raises(FusionError, match="--width 1"):
        sweep_here(sweep_of("seed=0,1"), tmp_path)


def make_stage(settings: SweepSettings) -> FusedStages:
    """The first stage of an array of all trials, without the other, so that it cannot train."""
    assert settings.train.pipeline is not None
    nobody: Any = None
    workers = WorkerGroup([0, 1], 0, nobody, nobody)
    trials = [with_values(settings.train, values) for values in combinations(settings.over)]
    entries = [make_entry(one, None, torch.device("cpu"), DataSets()) for one in trials]
    stages = prepare_trials(entries, arrange(settings.train.pipeline.plan), verify=False)
    return FusedStages(nobody, entries, nobody, workers, stages)


def keeps(kind: str) -> SweepSettings:
    model = ModelSettings("test_sweep_stages:Keeps", {"kind": kind, "number": 0})
    return in_stages("model_args.number=0,1", "seed=0,1", model=model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: in_stages("model_args.scale=0.5,2.0", model=HALVES),
            r"the model.scale is 2.0 in one trial, 0.5 in another",
        ),
        (
            lambda: keeps("tensor"),
            r"the model.kept is tensor\(\[1.\].*, tensor\(\[0.\].*register it as a buffer",
        ),
        (lambda: keeps("tuple"), r"the model.kept is \(1, 1, 2\) in one trial, \(1, 0, 2\) in another"),
        (lambda: keeps("list"), r"the model.kept is \(tensor\(1.\), tensor\(1\)\) in one trial"),
        (lambda: keeps("bool"), "the model.kept is True in one trial, False in another"),
        (lambda: keeps("int"), "the model.kept is 1 in one trial, 0 in another"),
        (lambda: keeps("str"), "the model.kept is number 1 in one trial, number 0 in another"),
        (lambda: keeps("dtype"), r"the model.kept is torch.float64 in one trial, torch.float32 in another"),
        (lambda: keeps("float or none"), "the model.kept is None in one trial, 0.5 in another"),
    ],
)
def test_models_that_stages_cannot_share_are_refused_with_the_reason(
    make: Callable[[], SweepSettings], message: str
):
    settings = make()
    with pytest.raises(PlaitError, match=message):
        make_stage(settings)


def test_trials_in_stages_may_differ_in_weights_and_in_numbers_of_torchs_own_modules():
    assert make_stage(keeps("same")).components.trials == 4
