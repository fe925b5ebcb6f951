"""Pipelines side by side whose stages average apart from each other, at each pipeline's own pace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from plait.core import run_events
from plait.core.errors import JobError
from plait.core.events import read
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
)
from plait.training import checkpoint, components
from plait.training.checks.plan_settings import check_pipeline
from plait.training.choose_engine import engine_of_stages
from plait.training.engines.replica_layout import among, replica_layouts
from support.averaging import job_store
from support.elastic import membership, run_elastic
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


def newest(folder: Path) -> checkpoint.Checkpoint:
    return checkpoint.load(checkpoint.list_checkpoints(folder / "checkpoints")[0])


def recorded(folder: Path, rank: int, kind: type[Any]) -> list[Any]:
    return [r.event for r in read(RunDir(folder).events(rank)) if isinstance(r.event, kind)]


class LastRows(nn.Module):
    """Keeps what it had of each row of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.register_buffer("rows", torch.zeros(4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x.flatten(1))
        self.rows[: len(y)] = y.detach()[:4]
        return y


def test_a_model_that_keeps_something_of_single_samples_is_refused(tmp_path: Path):
    settings = replace(side_by_side("local-sgd"), model=ModelSettings(f"{__name__}:LastRows"))
    run = Mock(settings=settings, components=components.build(settings, torch.device("cpu")))
    with pytest.raises(JobError, match="forward writes buffer 'rows' for single samples"):
        engine_of_stages(run)


# As under local SGD (test_engines.py).
@pytest.mark.extended
def test_where_all_average_after_every_update_two_pipelines_equal_one_process(tmp_path: Path):
    everyone = {"minimum": 2, "patience": 1000.0, "every": 1}
    settings = side_by_side(options=everyone, evaluate=EvaluateSettings(every_steps=10))
    result = train(settings, tmp_path / "pipelines")[0]
    plain, weights = train_here(unverified_job(steps=20, optimizer=PLAIN), tmp_path / "plain")
    assert largest_difference(newest(tmp_path / "pipelines").model, weights) < 1e-10
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


MORTAL = ModelSettings("support.elastic:MortalLayers", {"dies_at": 13, "norm": False})


# With the launcher, one goes on in faults/test_elastic.py; workers that wait take the places below.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("victim", "sync", "options"),
    [
        (0, "partial-reduce", {}),
        (3, "ad-psgd", {}),
        (1, "pair-averaging", {}),
        (2, "pair-sync", {}),
        (3, "sma", {}),
        (1, "local-sgd", {"every": 3, "outer": "nesterov"}),
        (3, "hetpipe", {"servers": 2}),
    ],
)
def test_where_a_worker_dies_the_others_go_on_in_whole_pipelines(
    victim: int, sync: str, options: dict[str, Any], tmp_path: Path
):
    """Worker 0 is the first of pipeline 0, and keeps the record; worker 3 is the second of pipeline 1."""
    settings = side_by_side(sync, options, model=MORTAL)
    rest = tuple(rank for rank in range(4) if rank != victim)
    after = membership(2, rest, lost=(victim,))
    found = run_elastic(settings, tmp_path, [(0, (0, 1, 2, 3))], victim=victim, after_loss=after)
    assert {(found[rank]["result"].reason, found[rank]["result"].step) for rank in rest} == {("finished", 20)}
    # Ten classes; how far it comes in 20 steps depends on the order in which workers average.
    assert found[rest[0]]["result"].test["accuracy"] > 0.25
    (change,) = recorded(tmp_path, rest[0], run_events.WorkersChanged)
    assert (change.members, change.lost) == (rest, (victim,))
    # Two of the three make a pipeline; the one that was with the lost worker waits.
    settled = [[e.members for e in recorded(tmp_path, rank, run_events.Settled)] for rank in rest]
    assert sorted(map(len, settled))[0] == 0
    assert sum(members[-1:] == [(rank,)] for rank, members in zip(rest, settled)) == 2


def test_workers_that_wait_take_the_places_of_those_that_are_lost(tmp_path: Path):
    watched: dict[str, Any] = {"monitor": ("noise-scale",), "evaluate": EvaluateSettings(every_steps=5)}
    settings = side_by_side(model=MORTAL, options={"minimum": 2}, **watched)
    after = membership(2, (0, 1, 3, 4), lost=(2,))
    found = run_elastic(settings, tmp_path, [(0, (0, 1, 2, 3, 4))], victim=2, after_loss=after)
    assert {found[rank]["result"].step for rank in (0, 1, 3, 4)} == {20}
    # Worker 4 waited; then it is in the pipeline of worker 0 or 1, and holds the second stage.
    assert {e.members for e in recorded(tmp_path, 4, run_events.Settled)} == {(3, 4)}
    assert recorded(tmp_path, 0, run_events.Settled)[-1].members == (0, 1)
    # Of three intervals or more: also of those in which it waited.
    assert found[0]["noise"][0] >= 3
    assert all(found[rank]["noise"] == found[0]["noise"] for rank in (1, 3, 4))


def test_the_state_of_the_sync_moves_with_the_stages(tmp_path: Path):
    """Two pipelines whose workers come and go are two workers under DiLoCo, which keeps an outer momentum."""
    outer = SyncSettings("local-sgd", {"every": 1, "outer": "nesterov"})
    common = {"steps": 9, "optimizer": OptimizerSettings("sgd", {"lr": 0.05})}
    stages = replace(unverified_plan((2, 2), Schedule.FLUSH, **common), sync=outer)
    versions = [(0, (0, 1, 2, 3)), (3, (1, 2, 3, 4)), (6, (3, 4))]
    run_elastic(stages, tmp_path / "stages", versions)
    with job_store() as store:
        whole = replace(unverified_job(**common), sync=outer)
        run_ranks(2, train_rank, whole, tmp_path / "whole", address=store)
    ours, expected = (newest(tmp_path / name) for name in ("stages", "whole"))
    assert largest_difference(ours.model, expected.model) < 1e-10
    assert expected.sync
    assert largest_difference(ours.sync, expected.sync) < 1e-10


def test_what_pipelines_side_by_side_cannot_do_is_refused_in_words():
    with pytest.raises(JobError, match="parallel.schedule: found stash with sync partial-reduce"):
        check_pipeline(side_by_side(schedule=Schedule.STASH), 4)
    with pytest.raises(JobError, match="sync_options.servers: found 3, expected 1 to 2, of 2 pipelines"):
        check_pipeline(side_by_side("hetpipe", {"servers": 3}), 4)
    with pytest.raises(JobError, match="sync_options.minimum: found 3, expected 2, of 2 pipelines"):
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


@pytest.mark.parametrize(
    ("positions", "pipelines"),
    [
        ([None] * 4, [(0, 2), (1, 3)]),
        # The first of four is lost, and another has joined.
        ([0, 1, 1, None], [(0, 1), (3, 2)]),
        ([0, 1, 1], [(0, 1)]),
        ([0, 0, 1, 1, None, None, None], [(0, 2), (1, 3), (4, 5)]),
        # The first rank keeps the record, whichever stage it held.
        ([1, 0], [(0, 1)]),
        ([1, 0, 0, None], [(0, 2), (1, 3)]),
    ],
)
def test_workers_that_stay_keep_their_stages(positions: list[int | None], pipelines: list[tuple[int, int]]):
    layout = among(check_pipeline(side_by_side(), None), positions)
    assert [tuple(worker for (worker,) in each.stages) for each in layout.layouts] == pipelines
