"""Layers that move between the workers of a pipeline: only those whose workers change, and exactly."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait.adapt.changes import BatchSizeChange, Change, PlanChange, TopologyChange
from plait.core import events
from plait.core.errors import PlaitError
from plait.core.run_events import Changed, LayersMoved
from plait.launcher.run_dir import RunDir
from plait.planner import Schedule, machines, make_plan
from plait.planner.partition.partitioner import Settings
from plait.planner.replan import moved_bytes, plan_for, replan
from plait.schema.plans.graph import Edge, Graph, Node
from plait.schema.settings import UNVERIFIED, TrainSettings
from plait.training import checkpoint as checkpoints
from plait.training import components
from plait.training.change.resharding import find_complete, find_moves
from plait.training.change.step_commit import StepCommit
from plait.training.run import Run
from plait.training.run_loop import RunLoop
from plait.training.stages.run_stages import pipeline_engine
from support.changes import StepTable
from support.plans import planned
from support.training import PlainWorker, largest_difference, train_here
from support.world import run_ranks

NAMES = st.sets(st.sampled_from("abcdef"))


@given(st.lists(NAMES, min_size=1, max_size=4), st.data())
def test_after_the_moves_each_worker_has_what_it_needs_and_nothing_moved_in_vain(
    held: list[set[str]], data: Any
):
    known = sorted(set().union(*held))
    ranks = st.sets(st.integers(0, len(held) - 1))
    needed = {name: data.draw(ranks) for name in known}
    moves = find_moves(held, needed)
    after = [set(names) for names in held]
    for name, source, target in moves:
        assert name in held[source]
        assert name not in after[target]
        after[target].add(name)
    assert all(name in after[rank] for name, users in needed.items() for rank in users)
    assert sum(map(len, after)) == sum(map(len, held)) + len(moves)


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 1), NAMES), min_size=1, max_size=5))
def test_the_state_to_go_on_from_is_whole_and_no_later_one_is(workers: list[tuple[int, int, set[str]]]):
    marks, held = [(step, done) for step, done, _ in workers], [names for *_, names in workers]
    found = find_complete(marks, held, "abc")

    def is_whole(step: int) -> bool:
        here = [names for mark, names in zip(marks, held) if mark[0] == step]
        return step >= 0 and set("abc") <= set().union(*here)

    steps = [step for step, _ in marks]
    if found is None:
        assert not any(map(is_whole, steps))
    else:
        assert is_whole(steps[found])
        assert not any(is_whole(step) and step > steps[found] for step in steps)
        # What some have not done after that step is done by all.
        assert marks[found] == min(mark for mark in marks if mark[0] == steps[found])


def train_under(rank: int, settings: TrainSettings, folder: Path, change: Change) -> str:
    torch.set_num_threads(1)
    parts = components.build(settings, torch.device("cpu"))
    run = Run(PlainWorker(), settings, parts, RunDir(folder))
    RunLoop(run, pipeline_engine(run), [StepTable({7: change})]).train(resume=False)
    return run.settings.topology.name


def test_a_pipeline_that_changes_its_plan_trains_as_one_process_does(tmp_path: Path):
    before = planned((2, 1), Schedule.FLUSH, steps=15, verify=UNVERIFIED)
    after = planned((1, 2), Schedule.FLUSH, steps=15)
    assert after.pipeline is not None
    run_ranks(3, train_under, before, tmp_path / "moved", PlanChange(after.pipeline.plan))
    train_here(replace(before, pipeline=None), tmp_path / "alone")
    ours, alone = (
        checkpoints.load(checkpoints.list_checkpoints(tmp_path / each / "checkpoints")[0])
        for each in ("moved", "alone")
    )
    assert largest_difference(ours.model, alone.model) < 1e-9
    assert largest_difference(ours.optimizer, alone.optimizer) < 1e-9
    found = [line.event for line in events.read(tmp_path / "moved" / "events" / "rank0.jsonl")]
    (moved,) = [event for event in found if isinstance(event, LayersMoved)]
    # The convolution and its norm stay with worker 0 and go to nobody; worker 1 takes the linear layer.
    assert moved.names == ("5.bias", "5.weight")
    assert [event.kind_of_change for event in found if isinstance(event, Changed)] == ["PlanChange"]


# Under stash, gradients are summed while other microbatches are in flight, too.
@pytest.mark.parametrize(
    "schedule", [pytest.param(Schedule.FLUSH, marks=pytest.mark.extended), Schedule.STASH]
)
def test_replicas_of_stages_go_over_to_another_topology_between_two_steps(schedule: Schedule, tmp_path: Path):
    """Compared with a run that drains after the same step."""
    settings = planned((2, 1), schedule, steps=10, verify=UNVERIFIED)
    size = settings.data.batch_size
    weights = []
    for name, change in (("changed", TopologyChange("ring")), ("same", BatchSizeChange(size))):
        found = run_ranks(3, train_under, settings, tmp_path / name, change)
        assert found == ["ring" if name == "changed" else "default"] * 3
        kept = checkpoints.list_checkpoints(tmp_path / name / "checkpoints")[0]
        weights.append(checkpoints.load(kept).model)
    assert largest_difference(*weights) < 1e-9


def refusals(rank: int, settings: TrainSettings, folder: Path, names: list[str]) -> list[str]:
    """What a pipeline says to topologies that its stages cannot have."""
    torch.set_num_threads(1)
    parts = components.build(settings, torch.device("cpu"))
    engine = pipeline_engine(Run(PlainWorker(), settings, parts, RunDir(folder)))
    engine.open()
    found = []
    for name in names:
        with pytest.raises(PlaitError) as caught:
            engine.apply(TopologyChange(name))
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ((1, 1), {"ring": "a pipeline with one worker a stage has no topology that can change"}),
        (
            (2, 1),
            {
                "star:2": "found 'star:2'",
                "ringg": "did you mean 'ring'",
                "my_graphs:two": "each stage needs a separate topology for its replicas",
            },
        ),
    ],
)
def test_a_topology_that_stages_cannot_have_is_refused_on_all_workers(
    replicas: tuple[int, ...], expected: dict[str, str], tmp_path: Path
):
    settings = planned(replicas, Schedule.FLUSH, verify=UNVERIFIED)
    for found in run_ranks(sum(replicas), refusals, settings, tmp_path, list(expected)):
        for said, words in zip(found, expected.values(), strict=True):
            assert words in said


def chain(seconds: list[float]) -> Graph:
    ids = [f"n{i}" for i in range(len(seconds))]
    nodes = tuple(Node(id, "", each / 3, 2 * each / 3, 1e3, 1e6) for id, each in zip(ids, seconds))
    return Graph(nodes, tuple(Edge(a, b, 1e3) for a, b in itertools.pairwise(ids)))


def test_a_slow_worker_gets_fewer_layers():
    graph = chain([1e-3] * 20)
    asked = Settings(Schedule.FLUSH, 16, straight=True)
    plan = make_plan(graph, machines(4, 1e9), asked)
    found = replan(plan, graph, [1.0, 1.0, 1 / 3, 1.0])
    counts = {stage.devices[0]: len(stage.layers) for stage in found.plan.stages}
    assert counts == {0: 6, 1: 6, 2: 2, 3: 6}
    assert found.step_s < 0.5 * found.before_s
    assert found.moved_bytes == moved_bytes(plan, found.plan, graph) > 0


def test_a_plan_for_fewer_workers_uses_all_of_them():
    graph = chain([1e-3] * 6)
    plan = make_plan(graph, machines(4, 1e9), Settings(Schedule.STASH, 4, straight=True))
    for workers in (1, 2, 3, 5):
        found = plan_for(plan, graph, [1.0] * workers)
        assert found.devices_used == workers
        assert (found.schedule, found.microbatches) == (Schedule.STASH, 4)


class OneStage:
    """A pipeline's part with one layer, as what commits a step sees it."""

    def __init__(self) -> None:
        self.layer = nn.BatchNorm1d(3)
        self.modules = {0: self.layer}
        self.parameters = dict(self.layer.named_parameters())
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.5)
        self.before_update: Any = None
        self.after_update: Any = None

    def backward(self) -> None:
        self.layer(torch.arange(12.0).reshape(4, 3)).square().sum().backward()


@pytest.mark.parametrize("write", [True, False])
def test_a_step_that_was_not_written_can_be_written_later_or_undone(write: bool):
    ours, plain = OneStage(), OneStage()
    commit = StepCommit(ours)  # type: ignore[arg-type]
    commit.begin_interval()
    ours.backward()
    # Another worker is lost while this one waits for all before its update.
    with pytest.raises((RuntimeError, ValueError)):
        ours.before_update()
    assert commit.is_ready
    commit.keep_gradients()
    commit.finish(write)
    if write:
        plain.backward()
        plain.optimizer.step()
    assert largest_difference(ours.layer.state_dict(), plain.layer.state_dict()) == 0.0
    assert all(parameter.grad is None for parameter in ours.layer.parameters())
