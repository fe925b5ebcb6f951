"""Pipelines whose workers come, go and are lost: layers move to those that are there, and no step changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.core import events
from plait.core.run_events import LayersMoved, RunStarted, WorkersChanged
from plait.planner import Schedule
from plait.planner.replan import plan_for
from plait.schema.settings import UNVERIFIED, CheckpointSettings, ModelSettings, TrainSettings
from plait.training import checkpoint as checkpoints
from support.elastic import membership, run_elastic
from support.plans import planned, with_graph
from support.training import largest_difference, train_here, train_rank
from support.world import run_ranks


def final_state(folder: Path) -> checkpoints.Checkpoint:
    return checkpoints.load(checkpoints.list_checkpoints(folder / "checkpoints")[0])


def recorded(folder: Path, kind: type) -> list:
    files = sorted((folder / "events").glob("rank*.jsonl"))
    found = [line for file in files for line in events.read(file) if isinstance(line.event, kind)]
    return [line.event for line in sorted(found, key=lambda line: line.t)]


def planned_for(settings: TrainSettings, workers: int) -> TrainSettings:
    """The settings with the plan that is made for that number of workers while the job runs."""
    assert settings.pipeline is not None
    plan, graph = settings.pipeline.plan, settings.pipeline.graph
    made = plan_for(plan, graph, [1.0] * workers)
    return replace(settings, pipeline=replace(settings.pipeline, plan=made))


def test_a_pipeline_whose_workers_come_and_go_trains_as_one_process_does(tmp_path: Path):
    settings = with_graph(planned((1, 1), Schedule.FLUSH, steps=24, verify=UNVERIFIED))
    versions = [(0, (0, 1)), (5, (0, 1, 2)), (11, (2,)), (17, (2, 3))]
    found = run_elastic(settings, tmp_path / "elastic", versions)
    train_here(replace(settings, pipeline=None), tmp_path / "alone")
    assert [each["result"] and each["result"].reason for each in found] == [*[None] * 2, *["finished"] * 2]
    ours, alone = final_state(tmp_path / "elastic"), final_state(tmp_path / "alone")
    assert ours.step == 24
    assert largest_difference(ours.model, alone.model) < 1e-9
    assert largest_difference(ours.optimizer, alone.optimizer) < 1e-9
    changes = recorded(tmp_path / "elastic", WorkersChanged)
    assert [change.members for change in changes] == [members for _, members in versions[1:]]
    # Nobody goes back: what only a worker holds that leaves goes to one that stays.
    assert all(change.step >= at for change, (at, _) in zip(changes, versions[1:]))
    assert [event.step for event in recorded(tmp_path / "elastic", RunStarted)] == [0]
    # Of six layers the first two stay with the first worker of three; the convolution is among them.
    moved = [event.names for event in recorded(tmp_path / "elastic", LayersMoved)]
    assert moved[0] == ("2.bias", "2.weight", "5.bias", "5.weight")
    # What leavers hand over to the worker that stays has moved, too.
    assert {"0.weight", "0.bias"} <= set(moved[1])


# With the launcher, one with flush goes on (faults/test_elastic.py).
@pytest.mark.parametrize(
    "schedule", [pytest.param(Schedule.FLUSH, marks=pytest.mark.extended), Schedule.STASH]
)
def test_without_a_worker_that_is_lost_a_pipeline_goes_on_from_its_last_checkpoint(
    schedule: Schedule, tmp_path: Path
):
    model = ModelSettings("support.elastic:MortalLayers", {"dies_at": 40})
    kept = CheckpointSettings(every_steps=8, keep_last=9)
    settings = planned((1, 1, 1), schedule, steps=14, model=model, checkpoint=kept, verify=UNVERIFIED)
    # Which version of the weights a microbatch has is a rule for any plan.
    pipeline = replace(settings.stages, vertical_sync=schedule is Schedule.STASH)
    settings = with_graph(replace(settings, pipeline=pipeline))
    run_elastic(
        settings,
        tmp_path / "elastic",
        [(0, (0, 1, 2))],
        victim=1,
        after_loss=membership(2, (0, 2), lost=(1,)),
    )
    first = replace(settings, steps=8, model=ModelSettings(model.factory, {"dies_at": 0}))
    run_ranks(3, train_rank, first, tmp_path / "planned")
    rest = replace(planned_for(first, 2), steps=14)
    run_ranks(2, train_rank, rest, tmp_path / "planned", resume=True)
    ours, expected = final_state(tmp_path / "elastic"), final_state(tmp_path / "planned")
    assert ours.step == expected.step == 14
    assert largest_difference(ours.model, expected.model) < 1e-9
    assert largest_difference(ours.optimizer, expected.optimizer) < 1e-9
    assert [event.step for event in recorded(tmp_path / "elastic", RunStarted)] == [0, 8]
    (change,) = recorded(tmp_path / "elastic", WorkersChanged)
    assert (change.step, change.members, change.lost) == (8, (0, 2), (1,))


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.extended)])
def test_where_replicas_are_left_a_pipeline_goes_on_from_its_last_step(victim: int, tmp_path: Path):
    model = ModelSettings("support.elastic:MortalLayers", {"dies_at": 23, "norm": False})
    settings = with_graph(planned((2, 2), Schedule.FLUSH, steps=16, model=model, verify=UNVERIFIED))
    rest = tuple(rank for rank in range(4) if rank != victim)
    run_elastic(
        settings,
        tmp_path / "elastic",
        [(0, (0, 1, 2, 3))],
        victim=victim,
        after_loss=membership(2, rest, lost=(victim,)),
    )
    train_here(replace(settings, pipeline=None), tmp_path / "alone")
    ours, alone = final_state(tmp_path / "elastic"), final_state(tmp_path / "alone")
    assert ours.step == 16
    assert largest_difference(ours.model, alone.model) < 1e-9
    assert largest_difference(ours.optimizer, alone.optimizer) < 1e-9
    (change,) = recorded(tmp_path / "elastic", WorkersChanged)
    # Two microbatches a step and replica: the step in which the worker's eleventh step is under way.
    assert (change.step, change.lost) == (11, (victim,))
    assert [event.step for event in recorded(tmp_path / "elastic", RunStarted)] == [0]
