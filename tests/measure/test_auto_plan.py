"""What a job's request for a plan makes the launcher measure, and which plan comes of what was measured."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.core.codec import encode
from plait.measure import auto_plan as module
from plait.measure.auto_plan import planned
from plait.measure.plan_warnings import describe_updates, other_microbatch
from plait.measure.profile_job import ProfileRequest, profile_job, time_data_parallel
from plait.planner import Plan, Schedule, Settings, fastest_plan, machines, save_plan
from plait.profiler.link_bandwidth import Link, Sum
from plait.profiler.profile import Profile
from plait.profiler.timing import Timed
from plait.schema.hosts import LOCAL, Host
from plait.schema.job import make_job
from plait.schema.placement import ElasticRules, Placement
from plait.schema.settings import (
    DataSettings,
    ModelSettings,
    PlanRequest,
    SlowSettings,
    SyncSettings,
    TrainSettings,
)
from plait.training.checks.plan_settings import check_pipeline
from support.graphs import chain
from support.plans import planned as cut_evenly
from support.training import PlainWorker, digits_job, train_here, train_rank
from support.world import run_ranks

pytestmark = pytest.mark.usefixtures("forked_commands")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of microbatches that were asked for; every layer takes a second and one for each sample."""
    asked: list[list[int]] = []

    def measure(request: ProfileRequest, placement: Any) -> tuple[Any, ...]:
        asked.append(list(request.batch_sizes))
        return tuple(profile_of(size) for size in request.batch_sizes)

    monkeypatch.setattr("plait.measure.profile_job.profile_together", measure)
    return asked


def profile_of(samples: int) -> Profile:
    graph = chain([0.5 + 0.5 * samples] * 4, output_bytes=1e3, parameter_bytes=1e3)
    links = (Link(0, 1, 1e9, 0.0, True),)
    sums = (Sum(2, 1e9, 0.0, True),)
    none = Timed(1.0, 0.0)
    return Profile("m", graph, "cpu", "float32", samples, "2", 1, 1, none, (), (), links, sums)


def plan_of(batch: int, workers: int, asked: PlanRequest, **changes: Any) -> Plan:
    settings = digits_job(data=DataSettings("digits", batch), **changes)
    made, plan = planned(settings, Placement((Host(LOCAL, workers),)), asked)
    assert made.pipeline is not None
    assert made.pipeline.plan == plan
    return plan


@pytest.mark.parametrize(("batch", "sizes"), [(64, [8, 32]), (65, [8, 33]), (15, [2, 8])])
def test_a_free_request_is_measured_in_small_pieces_and_in_one_a_worker(
    measured: list[list[int]], batch: int, sizes: list[int]
) -> None:
    plan = plan_of(batch, 2, PlanRequest("auto"))
    assert measured == [sizes]
    assert (plan.schedule, plan.microbatches, plan.stages[0].replicas) == (Schedule.FLUSH, 2, 2)
    # Four layers on the larger share of the batch, forward and backward.
    assert plan.step_s == pytest.approx(4 * (1 + sizes[1]), rel=1e-3)


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        (PlanRequest("auto", schedule="stash"), 64),
        (PlanRequest("auto", microbatches=8), 8),
        (PlanRequest("auto", vertical_sync=True), 64),
        (PlanRequest("auto", depths={0: 2}), 8),
        (PlanRequest("model-parallel"), 64),
        (PlanRequest("model-parallel", microbatches=8), 8),
    ],
)
def test_a_request_that_steers_the_pipeline_has_its_microbatches_alone_measured(
    measured: list[list[int]], asked: PlanRequest, size: int
) -> None:
    plan = plan_of(64, 2, asked)
    assert measured == [[size]]
    assert plan.microbatches == 64 // size
    assert plan.microbatch_samples == size
    asks_for_stash = asked.schedule is not None or asked.vertical_sync
    schedules = {True: Schedule.STASH, False: Schedule.FLUSH}
    assert plan.schedule is (Schedule.NONE if asked.plan == "model-parallel" else schedules[asks_for_stash])


@pytest.mark.parametrize(("batch", "workers"), [(1, 2), (2, 4), (3, 4)])
def test_a_batch_with_fewer_samples_than_workers_is_planned_as_single_samples(
    measured: list[list[int]], batch: int, workers: int
) -> None:
    plan = plan_of(batch, workers, PlanRequest("auto", schedule="2bw"))
    assert measured == [[1]]
    assert (plan.schedule, plan.microbatches) == (Schedule.TWO_BUFFERED, batch)


def test_one_worker_takes_its_batch_in_one_piece(measured: list[list[int]]) -> None:
    plan = plan_of(64, 1, PlanRequest("auto"))
    assert measured == [[64]]
    assert (plan.microbatches, plan.devices_used) == (1, 1)


def test_no_plan_delays_gradients_unless_the_job_asks_for_it(measured: list[list[int]]) -> None:
    for batch, workers in ((1, 2), (64, 2), (64, 4)):
        for changes in ({}, {"clip_norm": 1.0}, {"precision": "fp16"}):
            assert plan_of(batch, workers, PlanRequest("auto"), **changes).schedule is Schedule.FLUSH
    assert plan_of(64, 2, PlanRequest("auto", "2bw")).schedule is Schedule.TWO_BUFFERED


def test_timing_noise_changes_neither_the_plan_nor_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that take a few percent more or less from one measurement to the next."""
    noise = random.Random(0)

    def measure(request: ProfileRequest, placement: Any) -> tuple[Any, ...]:
        found = []
        for size in request.batch_sizes:
            layers = [(0.01 + 0.01 * size) * noise.uniform(0.95, 1.05) for _ in range(8)]
            graph = chain(layers, output_bytes=1e3, parameter_bytes=1e3)
            found.append(replace(profile_of(size), graph=graph))
        return tuple(found)

    monkeypatch.setattr("plait.measure.profile_job.profile_together", measure)
    plans = [plan_of(64, 2, PlanRequest("auto")) for _ in range(8)]
    chosen = {(plan.schedule, plan.microbatches, len(plan.stages)) for plan in plans}
    assert chosen == {(Schedule.FLUSH, 2, 1)}


def test_replicas_that_share_a_batch_out_run_without_a_pipeline_and_stay_so(
    measured: list[list[int]], tmp_path: Path
) -> None:
    job = make_job(
        {
            "name": "t",
            "model": "plait.workloads.mlp:mlp_tiny",
            "data": {"kind": "digits", "batch_size": 64},
            "steps": 3,
            "parallel": {"workers": 2, "plan": "auto"},
        }
    )
    settings, _, plan, _ = module.plan_job(job, job.settings(), job.placement)
    assert settings.pipeline is not None
    assert settings.as_run().pipeline is None
    (tmp_path / "settings.json").write_text(json.dumps(encode(settings)))
    before = module.settings_before(tmp_path / "settings.json")
    again, _, kept, _ = module.plan_job(job, job.settings(), job.placement, before)
    assert (again, kept) == (settings, plan)
    assert len(measured) == 1
    # Where the plan may change while the job runs, workers are ready for stages.
    elastic = replace(job.placement, elastic=ElasticRules(max_workers=2))
    assert module.plan_job(job, job.settings(), elastic)[0].as_run().pipeline is not None


def data_parallel_seconds(rank: int, settings: TrainSettings) -> float:
    return time_data_parallel(PlainWorker(), settings, torch.device("cpu"), least_s=0.05)


def test_data_parallelism_is_tried_out_on_the_jobs_own_batches() -> None:
    settings = digits_job(data=DataSettings("digits", 33), slow=SlowSettings({1: 3.0}))
    seconds = run_ranks(2, data_parallel_seconds, settings)
    assert seconds[0] == seconds[1] > 0


@pytest.mark.parametrize(
    ("layers", "workers", "words"),
    [
        ([1.0] * 4, 2, "an update takes the batch of 64 samples"),
        ([3.0, 1.0, 1.0, 1.0], 3, "stage 0 about 128, stage 1 about 64 samples"),
        ([1.0], 2, "an update takes the batch of 64 samples"),
    ],
)
def test_under_stash_an_update_takes_no_less_than_the_batch_of_the_job(
    layers: list[float], workers: int, words: str
) -> None:
    made = fastest_plan(chain(layers, output_bytes=1e3, parameter_bytes=1e3), machines(workers, 1e9))
    settings = digits_job(data=DataSettings("digits", 64))
    assert words in describe_updates(made, settings)


def test_smaller_updates_than_the_batch_are_reported(measured: list[list[int]]) -> None:
    settings = digits_job(data=DataSettings("digits", 64))
    plan = plan_of(64, 2, PlanRequest("auto", "stash", microbatches=8))
    assert "a batch makes 8 microbatches" in describe_updates(plan, settings)
    assert "all stages 8 samples" in describe_updates(plan, settings)
    assert describe_updates(plan_of(64, 2, PlanRequest("auto", "flush")), settings) == ""
    double = plan_of(64, 2, PlanRequest("auto", "2bw", microbatches=1))
    assert "an update takes 2 microbatches, and a batch makes 1: all stages 128" in describe_updates(
        double, settings
    )


def read_plan(folder: Path, plan: Plan, asked: dict[str, Any], batch: int = 64) -> tuple[Plan, str]:
    path = folder / "plan.json"
    save_plan(plan, path)
    settings = digits_job(data=DataSettings("digits", batch))
    _, found = planned(settings, Placement(), PlanRequest(str(path), **asked))
    return found, other_microbatch(found, settings)


def test_a_plan_file_keeps_its_microbatches_unless_stash_is_put_over_another_schedule(tmp_path: Path) -> None:
    graph, two = chain([1.0] * 4, output_bytes=1e3), machines(2, 1e9)
    plan = fastest_plan(graph, two, Settings(Schedule.FLUSH, 8, straight=True))
    assert read_plan(tmp_path, plan, {})[0].microbatches == 8
    assert read_plan(tmp_path, plan, {"schedule": "stash"})[0].microbatches == 1
    assert read_plan(tmp_path, plan, {"schedule": "stash", "microbatches": 8})[0].microbatches == 8
    assert read_plan(tmp_path, replace(plan, schedule=Schedule.STASH), {})[0].microbatches == 8


def test_a_plan_for_other_microbatches_than_those_that_run_says_so(tmp_path: Path) -> None:
    graph, two = chain([1.0] * 4, output_bytes=1e3), machines(2, 1e9)
    plan = replace(fastest_plan(graph, two, Settings(Schedule.FLUSH, 2)), microbatch_samples=16)
    assert "microbatches of 16 samples, but here they have 32" in read_plan(tmp_path, plan, {})[1]
    assert read_plan(tmp_path, plan, {"microbatches": 4})[1] == ""
    assert read_plan(tmp_path, replace(plan, microbatch_samples=None), {})[1] == ""


def test_a_run_that_goes_on_keeps_its_plan_until_the_job_changes(
    measured: list[list[int]], tmp_path: Path
) -> None:
    settings = digits_job(data=DataSettings("digits", 64))
    placement = Placement((Host(LOCAL, 2),))
    first, plan = planned(settings, placement, PlanRequest("auto"))
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(encode(first)))
    before = module.settings_before(path)
    assert planned(settings, placement, PlanRequest("auto"), before)[1] == plan
    assert len(measured) == 1
    assert (
        planned(settings, placement, PlanRequest("auto", "2bw"), before)[1].schedule is Schedule.TWO_BUFFERED
    )
    planned(settings, Placement((Host(LOCAL, 3),)), PlanRequest("auto"), before)
    planned(replace(settings, data=DataSettings("digits", 32)), placement, PlanRequest("auto"), before)
    assert len(measured) == 4
    assert module.settings_before(tmp_path / "elsewhere.json") is None


def test_a_plan_for_fewer_devices_than_workers_leaves_out_the_hosts_it_has_no_use_for() -> None:
    graph = chain([1.0] * 2, output_bytes=1e3)
    plan = fastest_plan(graph, machines(2, 1e9), Settings(straight=True))
    stages = (replace(plan.stages[0], devices=(1,)), replace(plan.stages[1], devices=(4,)))
    plan = replace(plan, stages=stages, machines=machines(6, 1e9))
    hosts = (Host("a", 2), Host("b", 2), Host("c", 2))
    found, placement = module.on_fewer_workers(plan, Placement(hosts))
    assert placement.hosts == (Host("a", 1), Host("c", 1))
    assert [stage.devices for stage in found.stages] == [(0,), (1,)]


@pytest.mark.parametrize("workers", [2, 4])
def test_pipelines_that_agree_by_averaging_are_planned_side_by_side(
    measured: list[list[int]], workers: int
) -> None:
    sync = SyncSettings("partial-reduce")
    settings = digits_job(data=DataSettings("digits", 64), sync=sync)
    made, plan = planned(settings, Placement((Host(LOCAL, workers),)), PlanRequest("auto"))
    assert plan.pipelines > 1
    assert plan.devices_used == workers
    check_pipeline(made, workers)


def test_a_small_model_is_measured_shared_out_and_trained_as_in_one_process(tmp_path: Path) -> None:
    model = ModelSettings("plait.workloads.mlp:mlp", {"inputs": 64, "hidden": [32, 32]})
    job = digits_job(model=model, data=DataSettings("digits", 65), steps=25, clip_norm=1.0)
    placement = Placement((Host(LOCAL, 2),), threads=1, timeout_s=60.0)
    made, plan = planned(job, placement, PlanRequest("auto"), measure_s=0.1)
    assert (plan.schedule, plan.microbatches, plan.stages[0].replicas) == (Schedule.FLUSH, 2, 2)
    assert "The same batch as 8 microbatches under schedule flush" in plan.why
    assert plan.step_s > 0
    result = run_ranks(2, train_rank, made, tmp_path / "planned")[0][0]
    plain, _ = train_here(job, tmp_path / "plain")
    assert result.step == 25
    assert result.test["loss"] == pytest.approx(plain.test["loss"], rel=1e-9)


def slow_to_copy() -> nn.Module:
    """A model whose first copy, which verification makes while a pipeline opens, takes a second."""
    return nn.Sequential(nn.Flatten(), SlowToCopy(64, 10))


class SlowToCopy(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        time.sleep(1.0)
        # Copies are plain, and so are copies of them.
        made = nn.Linear(self.in_features, self.out_features, dtype=self.weight.dtype)
        made.load_state_dict(self.state_dict())
        memo[id(self)] = made
        return made


def test_the_time_in_which_a_pipeline_opens_is_no_time_of_its_steps(tmp_path: Path) -> None:
    settings = cut_evenly((1,), Schedule.FLUSH, 1, model=ModelSettings("test_auto_plan:slow_to_copy"))
    result = run_ranks(1, train_rank, settings, tmp_path)[0][0]
    steps_s = 20 * 64 / result.samples_per_s
    assert result.seconds - steps_s > 0.9


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_profile_is_of_the_precision_that_the_job_trains_in(precision: Any) -> None:
    model = ModelSettings("plait.workloads.mlp:mlp", {"inputs": 64, "hidden": [32]})
    plain = profile_job(digits_job(model=model), 16, repeats=1)
    half = profile_job(digits_job(model=model, precision=precision), 16, repeats=1)
    names = {"bf16": "bfloat16", "fp16": "float16"}
    assert (plain.dtype, half.dtype) == ("float64", names[precision])
    assert half.graph.nodes[-1].output_bytes == plain.graph.nodes[-1].output_bytes / 4
    assert half.graph.parameter_bytes() == plain.graph.parameter_bytes() / 2
