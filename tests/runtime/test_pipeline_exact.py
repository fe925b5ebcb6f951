"""Synchronous pipelines take the same steps as one process that accumulates over the same microbatches."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from plait.planner.depth import Schedule
from support.pipelines import Case, Delayed, train_many, train_plainly
from support.world import run_ranks

TWO = (((0,), (1,)),)
THREE = (((0,), (1,), (2,)),)
SPREAD = (((0, 1), (2,)),)
MODELS = ["cnn", "lstm", "transformer"]


def assert_same(*cases: Case, tolerance: float = 1e-10, skip: str = "\0") -> None:
    """Every rank's weights and buffers are those of one process, and together they are all of them.

    All cases run in one world. `skip` ends the names of what need not agree.
    """
    ranks = max(w for case in cases for stages in case.layouts for ws in stages for w in ws) + 1
    answers = run_ranks(ranks, train_many, cases)
    for number, case in enumerate(cases):
        expected = train_plainly(case) if case.schedule.synchronous else Delayed(case).train()
        found: dict[str, Any] = {}
        for weights, _ in (answer[number] for answer in answers):
            for name, value in weights.items():
                difference = numpy.abs(value - expected[name]).max() if value.size else 0.0
                assert name.endswith(skip) or difference <= tolerance, f"{case}: {name} by {difference}"
            found |= weights
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("model", MODELS)
def test_synchronous_pipelines_equal_plain_training(model: str) -> None:
    kinds = (Schedule.FLUSH, Schedule.GPIPE, Schedule.ZERO_BUBBLE, Schedule.NONE)
    assert_same(*(Case(model, THREE, kind) for kind in kinds))


@pytest.mark.parametrize("model", MODELS)
def test_interleaved_stages_equal_plain_training(model: str) -> None:
    assert_same(Case(model, (((0,), (1,), (0,), (1,)),), Schedule.INTERLEAVED, microbatches=5))


@pytest.mark.parametrize("model", MODELS)
def test_weight_stashing_equals_the_same_delayed_gradients_in_one_process(model: str) -> None:
    stash = Case(model, THREE, Schedule.STASH, steps=6)
    assert_same(
        stash,
        Case(model, THREE, Schedule.STASH, steps=6, vertical_sync=True, optimizer="sgd"),
        Case(model, THREE, Schedule.TWO_BUFFERED, steps=6),
        Case(model, THREE, Schedule.TWO_BUFFERED, steps=6, microbatches=2, optimizer="sgd"),
        tolerance=1e-13,
    )
