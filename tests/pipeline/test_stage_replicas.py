"""A stage with many replicas before a stage with one, as PipeDream plans VGG-16 (there 15-1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch

from plait.pipeline.layout import PipelineLayout
from plait.pipeline.stage import InFlight
from plait.pipeline.updates.stage_optimizer import StageOptimizer, summed_during_backward
from plait.planner.schedules.in_flight import Schedule
from plait.schema.plans.plan import Layout
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.reducers import Native
from support.pipelines import Case, Delayed, train_in_pipeline, train_many, train_plainly
from support.world import run_ranks

SEVEN_AND_ONE = ((tuple(range(7)), (7,)),)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


# Numbers that replicas do not divide are in test_pipeline_exact.py.
@pytest.mark.extended
def test_seven_replicas_before_one_equal_plain_training() -> None:
    """9 microbatches a batch: two of the seven replicas have two each, the others one."""
    flush = Case("transformer", SEVEN_AND_ONE, Schedule.FLUSH, steps=2, microbatches=9, samples=18)
    stash = Case("cnn", SEVEN_AND_ONE, Schedule.STASH, steps=2, microbatches=8, samples=16, optimizer="sgd")
    answers = run_ranks(8, train_many, (flush, stash))
    for number, expected in enumerate([train_plainly(flush), Delayed(stash).train()]):
        for answer in answers:
            for name, value in answer[number][0].items():
                if not name.endswith(STATISTICS):
                    assert numpy.abs(value - expected[name]).max() < 1e-10, name


def sends_beside_backward(rank: int, case: Case) -> tuple[int, int]:
    """How many sums a rank starts while its backward runs, and how many at its updates."""
    counts = {"backward": 0, "update": 0}
    where = ["backward"]
    start, sum_gradients = Native.start, StageOptimizer.sum_gradients

    def counted(self: Native, index: int, fill: Any = None) -> Any:
        counts[where[0]] += 1
        return start(self, index, fill)

    def marked(self: StageOptimizer, updates: Any, work: Any) -> None:
        where[0] = "update"
        sum_gradients(self, updates, work)
        where[0] = "backward"

    with patch.object(Native, "start", counted), patch.object(StageOptimizer, "sum_gradients", marked):
        train_in_pipeline(rank, case)
    return counts["backward"], counts["update"]


def test_replicas_send_their_gradients_while_the_last_backward_before_an_update_runs() -> None:
    """All gradients of this small model are one message; what follows at the update is who had any.

    12 microbatches: under stash each replica updates six times, under 2bw three times.
    """
    flush = Case("transformer", (((0, 1),),), Schedule.FLUSH, steps=3)
    stash, buffered = (replace(flush, schedule=kind) for kind in (Schedule.STASH, Schedule.TWO_BUFFERED))
    again, busy = replace(stash, recompute=frozenset({0})), replace(stash, cores=2)
    found = run_ranks(2, sends_of_each, (flush, stash, buffered, again, busy))
    assert found == [[(3, 3), (6, 6), (3, 3), (6, 6), (0, 12)]] * 2


def sends_of_each(rank: int, cases: tuple[Case, ...]) -> list[tuple[int, int]]:
    return [sends_beside_backward(rank, case) for case in cases]


def order_of_rank(rank: int, case: Case) -> list[str]:
    """When a rank starts sums in backward, ends them, and gives back the memory of what it received."""
    order: list[str] = []
    start, sum_gradients, release = Native.start, AllReduce.sum_gradients, InFlight.release

    def started(self: Native, index: int, fill: Any = None) -> Any:
        order.append("send")
        return start(self, index, fill)

    def summed(self: AllReduce, notes: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        found = sum_gradients(self, notes, factor)
        order.append("sum")
        return found

    def released(self: InFlight) -> None:
        order.append("release")
        release(self)

    with (
        patch.object(Native, "start", started),
        patch.object(AllReduce, "sum_gradients", summed),
        patch.object(InFlight, "release", released),
    ):
        train_in_pipeline(rank, case)
    return order


def test_what_was_received_is_given_back_once_the_gradients_that_lie_in_it_are_summed() -> None:
    stash = Case("positions", (((0, 1), (2,)),), Schedule.STASH, steps=3, samples=4)
    first, second, last = run_ranks(3, order_of_rank, stash)
    # The gradients are one message, sent in backward; what follows at the update is who had any.
    assert first == second == ["send", "send", "sum", "release"] * 6
    # Who shares nothing has nothing to wait for.
    assert last == ["release"] * 12


def test_sums_overlap_with_backward_where_something_else_than_busy_cores_carries_them() -> None:
    layout = Layout(((0, 1), (2,), (3, 4)))
    stages = (("a",), ("b",), ("c",))
    stash = PipelineLayout(stages, (layout,), Schedule.STASH, 4)
    cpu, gpu, here = torch.device("cpu"), torch.device("cuda"), ("here",) * 5
    assert summed_during_backward(0, stash, cpu, here, cores=5) == frozenset()
    assert summed_during_backward(0, stash, cpu, here, cores=6) == {0}
    assert summed_during_backward(0, stash, gpu, here, cores=5) == {0}
    assert summed_during_backward(2, stash, cpu, here, cores=6) == frozenset()
    apart = ("a", "a", "a", "a", "b")
    assert summed_during_backward(0, stash, cpu, apart, cores=4) == frozenset()
    assert summed_during_backward(3, stash, cpu, apart, cores=4) == {2}
    flush = replace(stash, schedule=Schedule.FLUSH)
    assert summed_during_backward(0, flush, cpu, here, cores=64) == frozenset()
