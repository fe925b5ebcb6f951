"""Pipelines side by side whose stages average apart from each other, at each pipeline's own pace."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.core import run_events
from plait.core.errors import JobError, PeerError
from plait.core.events import read
from plait.launch.membership import Membership
from plait.launch.messages import WorkerRequest
from plait.launch.run_dir import RunDir
from plait.launch.worker_process import LaunchedWorker
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    EvaluateSettings,
    OptimizerSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
)
from plait.training import checkpoint, components
from plait.training.change.members import join_members
from plait.training.checks.pipeline import check_pipeline
from plait.training.choose_engine import make_loop
from plait.training.engines.pipeline_replica import PipelineReplica
from plait.training.engines.replica_layout import replica_layouts
from support.averaging import job_store
from support.elastic import ScriptedAgent
from support.meeting import SECRET
from support.plans import unverified_plan
from support.training import largest_difference, train_here, train_rank, unverified_job
from support.world import run_ranks

PLAIN = OptimizerSettings("sgd", {"lr": 0.05, "momentum": 0.9})


def side_by_side(sync: str = "partial-reduce", options: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Two stages of two workers each."""
    values = {"schedule": Schedule.FLUSH, "optimizer": PLAIN, **changes}
    return replace(unverified_plan((2, 2), **values), sync=SyncSettings(sync, options or {}))


def train(settings: TrainSettings, folder: Path) -> list[Any]:
    with job_store() as port:
        return [result for result, _ in run_ranks(4, train_rank, settings, folder, address=port)]


def final_weights(folder: Path) -> dict[str, Any]:
    return checkpoint.load(checkpoint.list_checkpoints(folder / "checkpoints")[0]).model


def recorded(folder: Path, rank: int, kind: type[Any]) -> list[Any]:
    return [r.event for r in read(RunDir(folder).events(rank)) if isinstance(r.event, kind)]


def test_where_all_average_after_every_update_two_pipelines_equal_one_process(tmp_path: Path):
    everyone = {"minimum": 2, "patience": 1000.0, "every": 1}
    settings = side_by_side(options=everyone, evaluate=EvaluateSettings(every_steps=10))
    result = train(settings, tmp_path / "pipelines")[0]
    plain, weights = train_here(unverified_job(steps=20, optimizer=PLAIN), tmp_path / "plain")
    assert largest_difference(final_weights(tmp_path / "pipelines"), weights) < 1e-10
    assert result.test == pytest.approx(plain.test, rel=1e-9)
    assert 0.0 < result.train_loss < 2.3
    _, resumed = train_here(unverified_job(steps=20, optimizer=PLAIN), tmp_path / "pipelines", resume=True)
    assert largest_difference(resumed, weights) < 1e-10
    started, _ = recorded(tmp_path / "pipelines", 0, run_events.RunStarted)
    assert started.parameters == sum(value.numel() for value in weights.values())
    # Each stage synchronized by itself, with the workers that hold it.
    assert [e.members for e in recorded(tmp_path / "pipelines", 0, run_events.Settled)] == [(0, 1), (0, 1)]
    assert [e.members for e in recorded(tmp_path / "pipelines", 3, run_events.Settled)] == [(2, 3), (2, 3)]


def samples_of(folder: Path, rank: int) -> int:
    return sum(e.samples for e in recorded(folder, rank, run_events.Pace))


def test_a_slow_worker_holds_up_its_own_pipeline_only(tmp_path: Path):
    settings = side_by_side(slow=SlowSettings({2: 30.0}), precision="float32")
    result = train(settings, tmp_path)[0]
    assert (result.reason, result.step) == ("finished", 20)
    slow, fast = samples_of(tmp_path, 0), samples_of(tmp_path, 1)
    assert slow + fast == 20 * 64
    # Pipelines that wait for each other take the same number.
    assert fast > 2 * slow
    assert [samples_of(tmp_path, rank) for rank in (2, 3)] == [slow, fast]


def lose_a_worker(
    rank: int, store: str, victim: int, settings: TrainSettings, folder: Path, hosts: str
) -> Any:
    """The run of one rank; the victim is killed before its fifth update, others say why they end."""
    torch.set_num_threads(1)
    dist.destroy_process_group()
    members = [(0, 1, 2, 3), tuple(m for m in range(4) if m != victim), (1, 3) if victim % 2 == 0 else (0, 2)]
    first, *later = (
        Membership(n, each, tuple(hosts[m] for m in each), tuple(m for m in range(4) if m not in each))
        for n, each in enumerate(members, 1)
    )
    order = WorkerRequest(rank, hosts[rank], rank, first, False, store, SECRET.hex(), "127.0.0.1", 30.0)
    worker = LaunchedWorker(order, ScriptedAgent(rank, *later))  # type: ignore[arg-type]
    join_members(worker, settings)
    if rank == victim:
        update, count = PipelineReplica.update, iter(range(5))

        def update_or_end(replica: PipelineReplica, *given: Any) -> float:
            if next(count) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(replica, *given)

        PipelineReplica.update = update_or_end  # type: ignore[method-assign]
    parts = components.build(settings, torch.device("cpu"))
    try:
        return make_loop(worker, settings, parts, RunDir(folder)).train(resume=False)
    except PeerError as failure:
        return str(failure)


@pytest.mark.parametrize(
    ("victim", "sync", "hosts"),
    [(0, "partial-reduce", "aabb"), pytest.param(3, "ad-psgd", "aabb", marks=pytest.mark.extended)],
)
def test_a_pipeline_that_loses_a_worker_ends_and_the_other_goes_on(
    victim: int, sync: str, hosts: str, tmp_path: Path
):
    """Worker 0 is the first of pipeline 0, and keeps the record; worker 3 is the second of pipeline 1."""
    settings = side_by_side(sync, {"lease_s": 0.5}, precision="float32")
    with job_store() as store:
        found = run_ranks(4, lose_a_worker, store, victim, settings, tmp_path, hosts, may_die=(victim,))
    broken, whole = ((0, 2), 1) if victim == 0 else ((1, 3), 0)
    (mate,) = set(broken) - {victim}
    assert found[mate] == "another worker of this one's pipeline is lost"
    assert (found[whole].reason, found[whole].step) == ("finished", 20)
    assert found[whole].test["accuracy"] > 0.4
    assert recorded(tmp_path, whole, run_events.WorkersChanged)[-1].lost == broken
    assert len(checkpoint.list_checkpoints(tmp_path / "checkpoints")) == 1


def test_what_pipelines_side_by_side_cannot_do_is_refused_in_words():
    with pytest.raises(JobError, match="parallel.schedule: found stash with sync partial-reduce"):
        check_pipeline(side_by_side(schedule=Schedule.STASH), 4)
    with pytest.raises(JobError, match="parallel.sync: found 'sma' with a pipeline"):
        check_pipeline(side_by_side("sma"), 4)
    with pytest.raises(JobError, match="sync_options.minimum: found 3, expected 2 to 2"):
        check_pipeline(side_by_side(options={"minimum": 3}), 4)
    with pytest.raises(JobError, match="clip_norm"):
        check_pipeline(side_by_side(clip_norm=1.0), 4)
    uneven = replace(unverified_plan((2, 1), Schedule.FLUSH), sync=SyncSettings("ad-psgd"))
    with pytest.raises(JobError, match=r"found stages with \[2, 1\] workers"):
        check_pipeline(uneven, 3)


def test_the_workers_of_a_plan_with_pipelines_are_its_replicas():
    settings = unverified_plan((4, 4), Schedule.FLUSH, microbatches=8)
    assert settings.pipeline is not None
    plan = replace(settings.pipeline.plan, pipelines=2)
    dealt = replace(settings, pipeline=replace(settings.pipeline, plan=plan))
    for each in (settings, dealt):
        replicas = replica_layouts(check_pipeline(each, 8))
        assert [replica.workers for replica in replicas] == [(0, 4), (1, 5), (2, 6), (3, 7)]
        assert {replica.microbatches for replica in replicas} == {2}
