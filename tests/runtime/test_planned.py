"""What a job's wish for a plan makes the launcher measure, and which plan comes of what was measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.cluster.hosts import LOCAL, Host
from plait.core.codec import decode
from plait.planner import Plan, Schedule
from plait.profiler.links import Link, Sum
from plait.profiler.profile import Profile
from plait.profiler.timing import Timed
from plait.runtime import build, pipeline_trainer
from plait.runtime import planned as module
from plait.runtime.folder import RunFolder
from plait.runtime.launch import Placement
from plait.runtime.planned import PlanWish, planned
from plait.runtime.settings import DataSettings, ModelSettings, TrainSettings
from support.graphs import chain
from support.plans import planned as cut_evenly
from support.training import TestWorker, digits_job, train_here
from support.world import run_ranks


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of microbatches that were asked for; every layer takes a second and one for each sample."""
    asked: list[list[int]] = []

    def measure(settings: Any, placement: Any, sizes: Sequence[int], *_: Any, **__: Any) -> tuple[Any, ...]:
        asked.append(list(sizes))
        return tuple(profile_of(size) for size in sizes)

    monkeypatch.setattr(module, "profile_together", measure)
    return asked


def profile_of(samples: int) -> Profile:
    graph = chain([0.5 + 0.5 * samples] * 4, output_bytes=1e3, parameter_bytes=1e3)
    links = (Link(0, 1, 1e9, 0.0, True),)
    sums = (Sum(2, 1e9, 0.0, True),)
    none = Timed(1.0, 0.0)
    return Profile("m", graph, "cpu", "float32", samples, "2", 1, 1, none, (), (), links, sums)


def plan_of(batch: int, workers: int, wish: PlanWish, **changes: Any) -> Plan:
    settings = digits_job(data=DataSettings("digits", batch), **changes)
    made, plan = planned(settings, Placement((Host(LOCAL, workers),)), wish)
    assert made.pipeline is not None
    assert decode(Plan, made.pipeline.plan, "plan") == plan
    return plan


@pytest.mark.parametrize(("batch", "sizes"), [(64, [8, 32]), (65, [8, 33]), (15, [2, 8])])
def test_a_free_wish_is_measured_in_small_pieces_and_in_one_a_worker(
    measured: list[list[int]], batch: int, sizes: list[int]
) -> None:
    plan = plan_of(batch, 2, PlanWish("auto"))
    assert measured == [sizes]
    assert (plan.schedule, plan.microbatches, plan.stages[0].replicas) == (Schedule.FLUSH, 2, 2)
    # Four layers on the larger share of the batch, forward and backward.
    assert plan.step_s == pytest.approx(4 * (1 + sizes[1]), rel=1e-3)


@pytest.mark.parametrize(
    "wish",
    [
        PlanWish("auto", schedule="stash"),
        PlanWish("auto", microbatches=8),
        PlanWish("auto", vertical_sync=True),
        PlanWish("auto", depths={0: 2}),
        PlanWish("model-parallel"),
    ],
)
def test_a_wish_that_steers_the_pipeline_has_its_microbatches_alone_measured(
    measured: list[list[int]], wish: PlanWish
) -> None:
    plan = plan_of(64, 2, wish)
    assert measured == [[8]]
    assert plan.microbatches == 8
    assert plan.schedule is (Schedule.NONE if wish.plan == "model-parallel" else Schedule.STASH)


@pytest.mark.parametrize(("batch", "workers"), [(1, 2), (2, 4), (3, 4)])
def test_a_batch_with_fewer_samples_than_workers_is_planned_as_single_samples(
    measured: list[list[int]], batch: int, workers: int
) -> None:
    plan = plan_of(batch, workers, PlanWish("auto"))
    assert measured == [[1]]
    assert (plan.schedule, plan.microbatches) == (Schedule.STASH, batch)


def test_one_worker_takes_its_batch_in_one_piece(measured: list[list[int]]) -> None:
    plan = plan_of(64, 1, PlanWish("auto"))
    assert measured == [[16, 64]]
    assert (plan.schedule, plan.microbatches, plan.devices_used) == (Schedule.FLUSH, 1, 1)


def test_a_job_that_clips_gradients_gets_a_schedule_that_can(measured: list[list[int]]) -> None:
    assert plan_of(1, 2, PlanWish("auto"), clip_norm=1.0).schedule is Schedule.FLUSH


def train_rank(rank: int, settings: TrainSettings, folder: Path, opening_s: float = 0.0) -> dict[str, Any]:
    torch.set_num_threads(1)
    parts = build.build(settings, torch.device("cpu"))
    size = dist.get_world_size()
    worker: Any = TestWorker(rank, size)
    prepare = pipeline_trainer.prepare_together

    def slow_prepare(*arguments: Any) -> Any:
        time.sleep(opening_s)
        return prepare(*arguments)

    pipeline_trainer.prepare_together = slow_prepare
    trainer = pipeline_trainer.PipelineTrainer(worker, settings, parts, RunFolder(folder), ["here"] * size)
    return trainer.run(resume=False)


def test_a_small_model_is_measured_shared_out_and_trained_as_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MEASURE_S", 0.1)
    model = ModelSettings("plait.workloads.mlp:mlp", {"inputs": 64, "hidden": [32, 32]})
    job = digits_job(model=model, data=DataSettings("digits", 65), steps=25)
    made, plan = planned(job, Placement((Host(LOCAL, 2),), threads=1, timeout_s=60.0), PlanWish("auto"))
    assert (plan.schedule, plan.microbatches, plan.stages[0].replicas) == (Schedule.FLUSH, 2, 2)
    assert "The same batch as 8 microbatches under schedule stash" in plan.why
    assert 0 < plan.step_s < 0.5
    result = run_ranks(2, train_rank, made, tmp_path / "planned")[0]
    plain, _ = train_here(job, tmp_path / "plain")
    assert result["step"] == 25
    assert result["test"]["loss"] == pytest.approx(plain["test"]["loss"], rel=1e-9)


def test_the_time_in_which_a_pipeline_opens_is_no_time_of_its_steps(tmp_path: Path) -> None:
    result = run_ranks(1, train_rank, cut_evenly((1,), Schedule.FLUSH, 1), tmp_path, opening_s=1.0)[0]
    steps_s = 20 * 64 / result["samples_per_s"]
    assert result["seconds"] - steps_s > 0.9
