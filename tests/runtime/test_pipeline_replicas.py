"""A stage with many replicas before a stage with one, as PipeDream plans VGG-16 (there 15-1)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy

from plait.planner.depth import Schedule
from plait.runtime.updates import Updates
from plait.sync.reducer import Native
from support.pipelines import Case, Delayed, train_in_pipeline, train_many, train_plainly
from support.world import run_ranks

SEVEN_AND_ONE = ((tuple(range(7)), (7,)),)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
    start, agree = Native.start, Updates.agree

    def counted(self: Native, index: int, fill: Any = None) -> Any:
        counts[where[0]] += 1
        return start(self, index, fill)

    def marked(self: Updates, updates: Any, work: Any) -> None:
        where[0] = "update"
        agree(self, updates, work)
        where[0] = "backward"

    with patch.object(Native, "start", counted), patch.object(Updates, "agree", marked):
        train_in_pipeline(rank, case)
    return counts["backward"], counts["update"]


def test_replicas_send_their_gradients_while_the_last_backward_runs() -> None:
    """All gradients of this small model are one message; what follows at the update is who had any."""
    case = Case("transformer", (((0, 1),),), Schedule.FLUSH, steps=3)
    assert run_ranks(2, sends_beside_backward, case) == [(3, 3), (3, 3)]
