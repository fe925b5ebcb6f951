"""What a plan says of a job's own choices, compared with what a run holds."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.measure.plan_warnings import describe_memory
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout, oldest_needed, stream
from plait.pipeline.updates.weight_stash import WeightVersions
from plait.planner import machines, with_runtime_memory
from plait.planner.plan_memory import versions_of_vertical_sync
from plait.planner.schedules.in_flight import Schedule, in_flight
from plait.planner.schedules.operations import Forward, Update
from plait.schema.settings import PipelineOptions
from support.pipelines import AllOf, Case, train_in_pipeline
from support.plans import planned, straight_layout
from support.world import run_ranks

STRAIGHT = (((0,), (1,), (2,)),)
CASES = {
    "plain": Case("cnn", STRAIGHT, Schedule.STASH, steps=6, samples=8, optimizer="sgd"),
    "vertical": Case(
        "cnn", STRAIGHT, Schedule.STASH, steps=6, samples=8, optimizer="sgd", vertical_sync=True
    ),
    "again": Case(
        "cnn",
        STRAIGHT,
        Schedule.STASH,
        steps=6,
        samples=8,
        optimizer="sgd",
        recompute=frozenset({0, 1}),
    ),
}


class Kept:
    """Bytes of the tensors that autograd keeps, each memory once, now and at most."""

    def __init__(self) -> None:
        self.most = 0
        # Memory that stays anyway.
        self.apart: set[int] = set()
        self._users: dict[int, list[int]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        class Box:
            pass

        box: Any = Box()
        box.tensor = tensor
        if isinstance(tensor, torch.nn.Parameter) or tensor._base is not None:
            return box
        place = tensor.untyped_storage().data_ptr()
        if place in self.apart:
            return box
        self._users.setdefault(place, [tensor.untyped_storage().nbytes(), 0])[1] += 1
        self.most = max(self.most, sum(size for size, _ in self._users.values()))
        weakref.finalize(box, self._forget, place)
        return box

    def _forget(self, place: int) -> None:
        self._users[place][1] -= 1
        if self._users[place][1] == 0:
            del self._users[place]


def counted(rank: int, cases: dict[str, Case]) -> dict[str, tuple[int, int]]:
    """For each case the most that autograd keeps on this rank, and the most copies of the weights."""
    found = {}
    run, update = PipelineExecutor.run, WeightVersions.update
    for name, case in cases.items():
        kept, copies = Kept(), [1]

        def watched(self: PipelineExecutor, ops: Any, work: Any, kept: Kept = kept) -> None:
            buffers = [b for module in self.modules.values() for b in module.buffers()]
            kept.apart = {b.untyped_storage().data_ptr() for b in buffers}
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda box: box.tensor):
                run(self, ops, work)

        def noted(self: WeightVersions, step: Any, needed: int, copies: list[int] = copies) -> None:
            update(self, step, needed)
            copies.append(self.buffers)

        with patch.object(PipelineExecutor, "run", watched), patch.object(WeightVersions, "update", noted):
            train_in_pipeline(rank, case)
        found[name] = kept.most, max(copies)
    return found


def test_a_run_holds_the_versions_and_activations_that_its_plan_says_for_the_jobs_choices() -> None:
    found = run_ranks(3, counted, CASES)
    bare = planned((1, 1, 1), Schedule.STASH).pipeline.plan
    kept, weights = 1000.0, 300.0
    stages = tuple(replace(s, parameter_bytes=weights, activation_bytes=kept) for s in bare.stages)
    plan = replace(bare, stages=stages, optimizer_copies=0.0)
    choices = {"plain": {}, "vertical": {"vertical_sync": True}, "again": {"recompute": (0, 1)}}
    for rank, answer in enumerate(found):
        alone = answer["plain"][0] / (3 - rank)
        for name, (most, copies) in answer.items():
            stage = with_runtime_memory(plan, PipelineOptions(**choices[name])).stages[rank]
            assert stage.in_flight == 3 - rank
            # One gradient of the weights besides the versions; a forward that is computed again keeps its own
            # few running statistics.
            expected = (copies + 1) * weights + most / alone * kept
            assert stage.memory_bytes == pytest.approx(expected, rel=0.02), (rank, name)
    assert [answer["vertical"][1] for answer in found] == [3, 3, 3]


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (3, 2, 1), (2, 3, 1), (4, 2, 2)])
@pytest.mark.parametrize("deeper", [0, 2])
def test_versions_under_vertical_sync_are_those_of_a_replayed_stream(
    replicas: tuple[int, ...], deeper: int
) -> None:
    layout = straight_layout(replicas)
    own = in_flight(Schedule.STASH, layout, 0, 1 << 40)
    depths = {0: own + deeper} if deeper else {}
    layers = tuple((f"n{s}",) for s in range(len(replicas)))
    pipeline_layout = PipelineLayout(layers, (layout,), Schedule.STASH, 8, depths, vertical_sync=True)
    for stage in range(len(replicas)):
        most = max(
            most_versions(pipeline_layout, stage, worker, AllOf(pipeline_layout, 160))
            for worker in layout.stages[stage]
        )
        assert versions_of_vertical_sync(layout, stage, depths) == most, stage


def most_versions(pipeline_layout: PipelineLayout, stage: int, worker: int, interval: AllOf) -> int:
    """From the oldest version that a microbatch in flight or the next one uses to the newest."""
    used: dict[int, int] = {}
    most = 1
    for op in stream(pipeline_layout, worker, interval):
        if isinstance(op, Forward):
            used[op.microbatch] = op.version
        elif isinstance(op, Update):
            oldest = min([oldest_needed(pipeline_layout, worker, op), *used.values()])
            most = max(most, op.version - oldest + 1)
        else:
            del used[op.microbatch]
    return most


def test_a_plan_that_no_longer_fits_with_what_the_job_sets_over_it_says_so() -> None:
    bare = planned((1, 1), Schedule.STASH).pipeline.plan
    stages = tuple(replace(s, parameter_bytes=100.0) for s in bare.stages)
    plan = replace(bare, stages=stages, optimizer_copies=0.0, machines=machines(2, 1e9, memory_bytes=300.0))
    assert with_runtime_memory(plan, PipelineOptions()).stages[1].memory_bytes == 200.0
    assert describe_memory(with_runtime_memory(plan, PipelineOptions())) == ""
    deeper = with_runtime_memory(plan, PipelineOptions(depths={0: 3}, vertical_sync=True))
    assert [stage.memory_bytes for stage in deeper.stages] == [400.0, 400.0]
    assert "device 0 would need" in describe_memory(deeper)
