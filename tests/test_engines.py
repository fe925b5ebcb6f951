"""The engines in one table: what each trains is what one worker makes of it, however it was interrupted.

Each row is a way to lay a job over workers; each test is one sentence that holds for all of them. What is
particular to an engine is tested beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from plait.core import events
from plait.core.run_events import RunStarted
from plait.planner.schedules.in_flight import Schedule
from plait.schema.plans.plan import Layout
from plait.schema.results import RunResult
from plait.schema.settings import (
    UNVERIFIED,
    CallSettings,
    DataSettings,
    EmaSettings,
    EvaluateSettings,
    MetricSettings,
    ModelSettings,
    OptimizerSettings,
    PolicySettings,
    SyncSettings,
    TrainSettings,
)
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from support.averaging import job_store
from support.elastic import Versions, run_elastic
from support.elastic_sweep import Change, run_elastic_sweep
from support.further import but_further
from support.plans import placed, planned, with_graph
from support.sweeping import sweep_of, sweep_rank
from support.syncs import settings_of
from support.told import told
from support.training import digits_job, largest_difference, saved_weights, train_here, train_rank
from support.world import run_ranks

STEPS = 9
MICROBATCHES = 3
# Batches become smaller, and the learning rate larger, in the middle.
TABLE = PolicySettings("steps", {"changes": {5: {"batch_size": 42, "lr_factor": 1.5}}})
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "adapt": (TABLE,),
    "data": DataSettings("support.training:digits", 60),
    "evaluate": EvaluateSettings(
        every_steps=4,
        metrics=(
            MetricSettings("accuracy"),
            MetricSettings("support.told:ranked"),
            MetricSettings("support.told:Farthest", {"scale": 2.0}, name="twice"),
        ),
    ),
    "callbacks": (CallSettings("support.told:Told"),),
    "verify": UNVERIFIED,
}
EMA = EmaSettings(0.7)
RULE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
JOB = digits_job(**COMMON, optimizer=OptimizerSettings("sgd", RULE, ema=EMA))
# The mean of two workers' steps is the step by the mean of their gradients, for an optimizer without memory.
MEMORYLESS = OptimizerSettings("sgd", {"lr": 0.05}, ema=EMA)
RATES = "optimizer.lr=0.01,0.05"


def in_stages(*replicas: int) -> TrainSettings:
    return planned(replicas, Schedule.FLUSH, MICROBATCHES, **COMMON, optimizer=JOB.optimizer)


def several_stages() -> TrainSettings:
    """Three stages, two on the first worker, one with replicas; a weight is tied between them."""
    model, layout = ModelSettings("support.sweeping:Halves", {"tied": True}), Layout(((0, 2), (1,), (0,)))
    return placed(layout, Schedule.ZERO_BUBBLE, MICROBATCHES, **COMMON, model=model)


def averaged() -> TrainSettings:
    return settings_of("local-sgd", {"every": 1}, **COMMON, precision="float64", optimizer=MEMORYLESS)


def side_by_side(*replicas: int) -> TrainSettings:
    """Pipelines of two stages whose weights are averaged after each update."""
    return replace(in_stages(*replicas), optimizer=MEMORYLESS, sync=SyncSettings("local-sgd", {"every": 1}))


@dataclass(frozen=True)
class Row:
    """A job or a sweep on some workers."""

    workers: int
    asked: TrainSettings | SweepSettings

    def alone(self, values: dict[str, Any]) -> TrainSettings:
        """A trial of it as one worker trains it."""
        job = self.asked.train if isinstance(self.asked, SweepSettings) else self.asked
        return with_values(replace(job, pipeline=None, sync=SyncSettings()), values)


ROWS: dict[str, Callable[[], Row]] = {
    "whole model": lambda: Row(2, JOB),
    "pipeline": lambda: Row(2, in_stages(1, 1)),
    "pipeline with replicas": lambda: Row(3, in_stages(2, 1)),
    "decentralized": lambda: Row(2, averaged()),
    "pipelines side by side": lambda: Row(4, side_by_side(2, 2)),
    "fused": lambda: Row(1, sweep_of(RATES, job=JOB)),
    "fused, whole model": lambda: Row(2, replace(sweep_of(RATES, job=JOB), replicas=2)),
    "fused, decentralized": lambda: Row(2, replace(sweep_of(RATES, job=averaged()), replicas=2)),
    "fused, pipeline": lambda: Row(2, sweep_of(RATES, job=in_stages(1, 1))),
    "fused, pipeline with replicas": lambda: Row(3, sweep_of(RATES, job=several_stages())),
    "fused, pipelines": lambda: Row(4, replace(sweep_of(RATES, job=in_stages(1, 1)), replicas=2)),
    "fused, pipelines side by side": lambda: Row(
        4, replace(sweep_of(RATES, job=side_by_side(1, 1)), replicas=2)
    ),
    "one by one, pipeline": lambda: Row(2, sweep_of(RATES, job=in_stages(1, 1), width=1)),
}


@dataclass(frozen=True)
class Outcome:
    """What each trial came to, by its values, and the weights of the best one."""

    reason: str
    metrics: dict[str, dict[str, float]]
    best: dict[str, Any]
    weights: dict[str, Any]
    told: list[list[Any]]


def outcome_of(result: Any, folder: Path) -> Outcome:
    if isinstance(result, RunResult):
        return Outcome(result.reason, {"{}": result.test}, {}, saved_weights(folder), told(folder))
    metrics = {str(trial["values"]): trial["metrics"] for trial in result["trials"]}
    weights = saved_weights(folder)
    return Outcome(result["reason"], metrics, result["best"]["values"], weights, told(folder))


def train(rank: int, row: Row, folder: Path, **how: Any) -> Any:
    """The result of a job or a sweep on this rank of a world."""
    if isinstance(row.asked, SweepSettings):
        return sweep_rank(rank, row.asked, folder, how.get("resume", False), how.get("stop_file"))
    return train_rank(rank, row.asked, folder, **how)[0]


def train_and_resume(rank: int, row: Row, folder: Path, addresses: list[str]) -> list[Any]:
    """Results of a run, and of one that is stopped at its first step and goes on."""
    first, second, third = ({"address": address} for address in addresses)
    stop = folder / "stop"
    whole = train(rank, row, folder / "whole", **first)
    if rank == 0:
        stop.touch()
    dist.barrier()
    stopped = train(rank, row, folder / "cut", stop_file=stop, **second)
    return [whole, train(rank, row, folder / "cut", resume=True, **third), stopped]


# Others have more stages, replicas or pipelines; trials one by one are in sweep/test_sweep_stages.py.
FURTHER = (
    "pipeline",
    "decentralized",
    "fused",
    "fused, decentralized",
    "fused, pipeline",
    "fused, pipelines",
    "one by one, pipeline",
)


@pytest.mark.parametrize("name", but_further(ROWS, *FURTHER))
def test_it_trains_evaluates_resumes_and_tells_its_callbacks_as_one_worker_does(
    name: str, tmp_path: Path
) -> None:
    """In a run, and in one that was stopped and went on."""
    row = ROWS[name]()
    with ExitStack() as stack:
        addresses = [stack.enter_context(job_store()) for _ in range(3)]
        results = run_ranks(row.workers, train_and_resume, row, tmp_path, addresses)[0]
    stopped = results.pop()
    assert (stopped.reason if isinstance(stopped, RunResult) else stopped["reason"]) == "stopped"
    whole, resumed = (outcome_of(each, tmp_path / name) for each, name in zip(results, ("whole", "cut")))
    assert_same_as_alone(row, whole, tmp_path / "alone")
    assert_resumed_the_same(row, whole, resumed)
    assert_told_once(whole, resumed)


def assert_same_as_alone(row: Row, whole: Outcome, folder: Path) -> None:
    """Each trial has the metrics of one worker that trains it, the best one its weights, too."""
    assert whole.reason == "finished"
    assert str(whole.best) in whole.metrics
    for number, (values, metrics) in enumerate(whole.metrics.items()):
        alone, weights = train_here(row.alone(ast.literal_eval(values)), folder / str(number))
        assert metrics == pytest.approx(alone.test, abs=1e-10)
        if values == str(whole.best):
            assert largest_difference(whole.weights, weights) < 1e-10


def assert_resumed_the_same(row: Row, whole: Outcome, resumed: Outcome) -> None:
    # An array that is made again may have other kernels, which round otherwise; a run has the same bits.
    allowed = 1e-12 if isinstance(row.asked, SweepSettings) else 0.0
    assert (resumed.reason, resumed.best) == (whole.reason, whole.best)
    assert largest_difference(resumed.weights, whole.weights) <= allowed
    for values, metrics in whole.metrics.items():
        # The moving average that is evaluated is the mean of members' only where these synchronize.
        assert resumed.metrics[values] == pytest.approx(metrics, rel=0.0, abs=1e-12)


def assert_told_once(whole: Outcome, resumed: Outcome) -> None:
    """Callbacks are told once what each trial came to."""
    assert len(whole.told) == len(whole.metrics)
    for told_of in whole.told:
        assert (told_of[0][:2], told_of[-1]) == (["start", 0], ["end", STEPS, "finished"])
        assert [each[1] for each in told_of if each[0] == "evaluate"] == [4, 8, STEPS]
    last = [[each for each in told_of if each[0] == "evaluate"][-1][2] for told_of in whole.told]
    assert sorted(each["loss"] for each in last) == sorted(each["loss"] for each in whole.metrics.values())
    assert {name for each in last for name in each} == {"loss", "accuracy", "ranked", "twice"}
    # The part that was stopped has an end, too.
    assert {told_of[-1][2] for told_of in resumed.told} >= {"finished"}


# Of five workers in pipelines of two, one waits; then all that have a stage but one leave.
@pytest.mark.parametrize(
    ("name", "versions"),
    [
        # training/test_elastic_members.py has more of this one.
        pytest.param("whole model", [(0, (0, 1)), (3, (0, 1, 2)), (6, (2,))], marks=pytest.mark.extended),
        # training/test_elastic_pipelines.py has more of this one.
        pytest.param("pipeline", [(0, (0, 1)), (3, (0, 1, 2)), (6, (2,))], marks=pytest.mark.extended),
        # training/test_elastic_averaging.py has more of this one.
        pytest.param("decentralized", [(0, (0, 1)), (3, (0, 1, 2)), (6, (2,))], marks=pytest.mark.extended),
        ("pipelines side by side", [(0, (0, 1, 2, 3)), (3, (0, 1, 2, 3, 4)), (5, (2, 4)), (7, (2, 4, 5, 6))]),
    ],
)
def test_workers_that_come_and_go_change_nothing(name: str, versions: Versions, tmp_path: Path) -> None:
    row = ROWS[name]()
    assert isinstance(row.asked, TrainSettings)
    settings = with_graph(row.asked) if row.asked.pipeline is not None else row.asked
    run_elastic(settings, tmp_path / "elastic", versions)
    files = (tmp_path / "elastic" / "events").glob("rank*.jsonl")
    recorded = [line.event for file in files for line in events.read(file)]
    # Nobody goes back to a checkpoint.
    assert [event.step for event in recorded if isinstance(event, RunStarted)] == [0]
    _, weights = train_here(row.alone({}), tmp_path / "alone")
    assert largest_difference(saved_weights(tmp_path / "elastic"), weights) < 1e-10


# The workers of a group do not change while it trains, whatever they do.
@pytest.mark.parametrize(
    "name",
    but_further(
        ("fused", "fused, whole model", "fused, pipeline", "fused, pipelines side by side"),
        "fused",
        "fused, pipeline",
        "fused, pipelines side by side",
    ),
)
def test_nor_do_they_change_a_trial_of_a_sweep(name: str, tmp_path: Path) -> None:
    row = ROWS[name]()
    assert isinstance(row.asked, SweepSettings)
    sweep = replace(row.asked, width=1)
    # A second group joins, then the first leaves.
    groups = [tuple(range(first, first + row.workers)) for first in (0, row.workers)]
    script = [Change(0, 3, groups[0] + groups[1]), Change(0, 6, groups[1])]
    result, _ = run_elastic_sweep(sweep, tmp_path / "elastic", groups[0], *script)
    found = outcome_of(result, tmp_path / "elastic")
    _, weights = train_here(row.alone(found.best), tmp_path / "alone")
    assert largest_difference(found.weights, weights) < 1e-10
