"""A stage with many replicas before a stage with one, as PipeDream plans VGG-16 (there 15-1)."""

from __future__ import annotations

import numpy

from plait.planner.depth import Schedule
from support.pipelines import Case, Delayed, train_many, train_plainly
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
