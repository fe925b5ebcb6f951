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
from plait.launch.run_dir import RunDir
from plait.pipeline.layout import arrange
from plait.planner.schedules.kinds import Schedule
from plait.schema.job import make_job
from plait.schema.settings import (
    CheckpointSettings,
    EvaluateSettings,
    GroupSettings,
    ModelSettings,
    OptimizerSettings,
    PipelineSettings,
    PlanRequest,
)
from plait.sweeping.datasets import DataSets
from plait.sweeping.engines.fused_stages import FusedStages
from plait.sweeping.engines.verified_stages import prepare_trials
from plait.sweeping.search.space import combinations
from plait.sweeping.search.values import check
from plait.sweeping.settings import SweepSettings
from plait.sweeping.sweep_loop import make_entry
from plait.sweeping.trial_settings import with_values
from plait.sweeping.worker_group import check_worker_groups
from plait.training import checkpoint as checkpoints
from plait.training.worker_group import WorkerGroup
from support.plans import unverified_plan
from support.sweeping import (
    killed_sweep,
    same_table,
    stop_and_go_on,
    sweep_here,
    sweep_of,
    sweep_rank,
    sweeps_rank,
    trial_alone,
)
from support.training import largest_difference, unverified_job
from support.world import run_ranks

MICROBATCHES = 3
STEPS = 10
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


HALVES = ModelSettings("support.sweeping:Halves")
NORM = ModelSettings("support.sweeping:norm_net")
DROP = ModelSettings("support.training:small_net", {"dropout": 0.4})
DUE = {"evaluate": EvaluateSettings(every_steps=6), "checkpoint": CheckpointSettings(every_steps=5)}


# Of each schedule and kind of model, whose layers do not depend on its arguments: tracing takes a while.
_PLANS: dict[tuple[Schedule, str], PipelineSettings | None] = {}


def in_stages(
    *over: str, schedule: Schedule = Schedule.FLUSH, width: int | None = 3, **options: Any
) -> SweepSettings:
    """A sweep whose arrays lie in two stages."""
    search = {name: options.pop(name) for name in ("kind", "trials", "least_steps") if name in options}
    model = options.get("model")
    key = schedule, model.factory if model else ""
    if key not in _PLANS:
        _PLANS[key] = unverified_plan((1, 1), schedule, MICROBATCHES, **options).pipeline
    job = unverified_job(steps=STEPS, pipeline=_PLANS[key], **options)
    return sweep_of(*over, job=job, width=width, **search)


def on_one(settings: SweepSettings) -> SweepSettings:
    """The same on one worker that takes as many microbatches a step."""
    return replace(settings, train=replace(settings.train, pipeline=None, accumulate=MICROBATCHES))


@functools.cache
def sweeps() -> dict[str, SweepSettings]:
    """Sweeps that one world runs one after another. Made when they are needed: they trace their models."""
    return {
        "flush": in_stages(
            "data.batch_size=2,64", "clip_norm=null,0.3", "seed=0,1", optimizer=ADAM, model=HALVES
        ),
        "gpipe": in_stages(
            "data.batch_size=2,64", "optimizer.lr=0.01,0.1", schedule=Schedule.GPIPE, model=NORM
        ),
        "tied": in_stages("optimizer.lr=0.01,0.1", model=ModelSettings("support.sweeping:Tied")),
        "twice named": in_stages("optimizer.lr=0.01,0.1", model=ModelSettings("support.training:TwiceNamed")),
        "pbt": in_stages("optimizer.lr=log:1e-3:0.3", kind="pbt", trials=5, least_steps=8, **DUE),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the sweeps above, and what they came to on two workers."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, run_ranks(2, sweeps_rank, sweeps(), folder, deadline_s=100)[0]


@pytest.mark.parametrize("name", ["flush", "gpipe", "tied", "twice named", "pbt"])
def test_a_trial_in_two_stages_equals_that_on_one_worker(
    name: str, pair: tuple[Path, dict[str, Any]], tmp_path: Path
):
    folder, found = pair
    one = on_one(sweeps()[name])
    assert same_table(sweep_here(one, tmp_path / "one"), found[name], tolerance=1e-10)
    if name != "pbt":
        _, weights = trial_alone(one, found[name]["best"]["values"], tmp_path / "alone")
        (path,) = checkpoints.list_checkpoints(RunDir(folder / name).checkpoints)
        assert largest_difference(checkpoints.load(path).model, weights) < 1e-10


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


def test_two_pipelines_take_their_arrays_from_one_queue(tmp_path: Path):
    settings = in_stages("optimizer.lr=log:1e-3:0.3:3", "seed=0,1", width=2)
    found = run_ranks(4, sweep_rank, settings, tmp_path / "four")[0]
    assert same_table(sweep_here(on_one(settings), tmp_path / "one"), found, tolerance=1e-10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: in_stages("seed=0,1", schedule=Schedule.STASH),
            "parallel.schedule: found stash, expected flush",
        ),
        (lambda: replace(in_stages("seed=0,1"), replicas=2), "--replicas: found 2 with a plan"),
        (lambda: in_stages("seed=0,1", width=None), "--width: found none"),
        (lambda: in_stages("seed=0,1", precision="fp16"), "precision: found 'fp16'"),
        (
            lambda: in_stages("seed=0,1", accumulate=2),
            "accumulate: a pipeline accumulates by itself",
        ),
        (lambda: in_stages("precision=bf16,fp16"), "precision: found 'fp16'"),
        (lambda: in_stages("accumulate=1,2"), "accumulate: a pipeline accumulates by itself"),
        (lambda: in_stages("optimizer.kind=sgd,adamax"), "optimizer.kind: found 'adamax'"),
        (
            lambda: sweep_of("seed=0,1", job=unverified_plan((2, 1), Schedule.FLUSH)),
            r"found stages with \[2, 1\] workers on 3 in all, expected one stage for each",
        ),
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
        InputError, match="--plan: found 2 stages, which do not divide the 3 workers; use -np 2"
    ):
        check_worker_groups(in_stages("seed=0,1"), 3)


class MeasuredError(Exception):
    """The job would be measured now."""


@pytest.mark.parametrize(
    ("schedule", "message"),
    [(None, "flush"), ("gpipe", "gpipe"), ("stash", "parallel.schedule: found stash, expected flush")],
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


@pytest.mark.parametrize("in_a_stage", [True, False])
def test_width_one_is_advised_only_where_it_helps(
    in_a_stage: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any, **options: Any) -> Any:
        raise FusionError("cannot be fused")

    monkeypatch.setattr("plait.sweeping.worker.SweepLoop", refuse)
    job = unverified_plan((1,), Schedule.FLUSH)
    settings = sweep_of("seed=0,1", job=job if in_a_stage else replace(job, pipeline=None))
    with pytest.raises(FusionError) as failure:
        sweep_here(settings, tmp_path)
    assert ("--width 1" in str(failure.value)) is not in_a_stage


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
            lambda: in_stages("seed=0,1", model=replace(HALVES, args={"tied": True})),
            r"parameter 'first.weight' is tied between stages \[0, 1\]",
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
