"""Synchronous pipelines take the same steps as one process that accumulates over the same microbatches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest

from plait.planner.schedules.kinds import Schedule
from support.pipelines import Case, Delayed, train_many, train_plainly
from support.world import run_ranks

TWO = (((0,), (1,)),)
THREE = (((0,), (1,), (2,)),)
SPREAD = (((0, 1), (2,)),)
MODELS = ["cnn", "lstm", "transformer"]


def assert_same(*cases: Case, tolerance: float = 1e-10, skip: tuple[str, ...] = ("\0",)) -> None:
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


def test_translation_with_lengths_that_change_equals_one_process_under_flush_and_stash() -> None:
    assert_same(
        Case("gnmt", TWO, Schedule.FLUSH, steps=3),
        Case("gnmt", TWO, Schedule.STASH, steps=3, microbatches=2),
    )


def test_replicated_stages_and_pipelines_side_by_side_equal_plain_training() -> None:
    """15 microbatches that no number of replicas divides; gradients alone, BatchNorm's statistics differ."""
    assert_same(
        Case("transformer", (((0, 1), (2,), (3,)),), Schedule.FLUSH, microbatches=5, steps=6),
        Case("lstm", (((0,), (1, 2, 3)),), Schedule.GPIPE, microbatches=5, steps=6),
        Case("lstm", (((0, 1, 2), (3,)),), Schedule.ZERO_BUBBLE, microbatches=4, steps=6),
        Case("transformer", (((0,), (1,)), ((2,), (3,))), Schedule.FLUSH, microbatches=5, steps=6),
        Case("lstm", (((0,), (1,)), ((2,), (3,))), Schedule.GPIPE, microbatches=1, steps=3),
        Case("transformer", (((0, 1, 2, 3),),), Schedule.FLUSH, microbatches=6, steps=6, clip_norm=0.1),
        Case("lstm", (((0,), (1,), (2,), (3,)),), Schedule.FLUSH, steps=6, clip_norm=0.05),
    )


def test_replicated_stages_under_stashing_equal_the_same_delayed_gradients() -> None:
    rounds = {"steps": 5, "microbatches": 5, "optimizer": "sgd"}
    assert_same(
        Case("cnn", (((0, 1), (2,), (3,)),), Schedule.STASH, **rounds),
        Case("cnn", (((0,), (1, 2, 3)),), Schedule.STASH, **rounds),
        Case("transformer", (((0, 1), (2, 3)),), Schedule.STASH, **rounds),
        Case("transformer", (((0, 1), (2,), (3,)),), Schedule.TWO_BUFFERED, **rounds),
        Case("lstm", (((0,), (1,)), ((2,), (3,))), Schedule.STASH, **rounds),
        Case("lstm", (((0,), (1,)), ((2,), (3,))), Schedule.TWO_BUFFERED, **rounds),
        Case("cnn", (((0, 1), (2,), (3,)),), Schedule.STASH, vertical_sync=True, **rounds),
        Case("cnn", (((0,), (1, 2, 3)),), Schedule.STASH, recompute=frozenset({1}), **rounds),
        Case("positions", (((0, 1), (2, 3)),), Schedule.STASH, samples=5, **rounds),
        Case("transformer", (((0, 1), (2, 3)),), Schedule.STASH, cores=1, **rounds),
        Case("transformer", (((0, 1), (2,), (3,)),), Schedule.TWO_BUFFERED, cores=1, **rounds),
        tolerance=1e-12,
        skip=("running_mean", "running_var", "num_batches_tracked"),
    )


def test_stages_that_never_drain_clip_their_own_gradients() -> None:
    """What stages share is clipped apart."""
    clipped = {"steps": 6, "optimizer": "sgd", "clip_norm": 0.02}
    assert_same(
        Case("lstm", THREE, Schedule.STASH, **clipped),
        Case("transformer", THREE, Schedule.TWO_BUFFERED, **clipped),
        Case("cnn", SPREAD, Schedule.STASH, **clipped),
        Case("cnn", (((0,), (1,), (2,), (0,)),), Schedule.STASH, **clipped),
        tolerance=1e-12,
        skip=("running_mean", "running_var", "num_batches_tracked"),
    )


def test_recompute_deeper_warm_up_and_gloo_between_hosts_change_nothing() -> None:
    everywhere = frozenset({0, 1, 2})
    assert_same(
        Case("cnn", THREE, Schedule.FLUSH, steps=6, recompute=everywhere),
        Case("cnn", THREE, Schedule.STASH, steps=6, recompute=frozenset({0, 2})),
        Case("transformer", THREE, Schedule.ZERO_BUBBLE, steps=6, recompute=everywhere),
        Case("lstm", THREE, Schedule.FLUSH, steps=6, depths={0: 4, 1: 3}),
        Case("lstm", THREE, Schedule.STASH, steps=6, depths={0: 5, 1: 3}),
        Case("transformer", THREE, Schedule.FLUSH, steps=6, hosts=("a", "b", "a")),
        Case("lstm", THREE, Schedule.STASH, steps=6, hosts=("a", "b", "c")),
        tolerance=1e-12,
    )


def test_dropout_and_dicts_of_integers_give_the_same_whatever_the_schedule_and_the_replicas() -> None:
    """Dropout is a function of the microbatch and the stage, so runs that differ in all else agree."""
    common = {"steps": 4, "microbatches": 4, "samples": 9}
    first_wide, last_wide = (((0, 1), (2,)),), (((0,), (1, 2)),)
    cases = (
        Case("masked", first_wide, Schedule.FLUSH, **common),
        Case("masked", last_wide, Schedule.ZERO_BUBBLE, **common),
        Case("masked", last_wide, Schedule.FLUSH, recompute=frozenset({0, 1}), **common),
        Case("masked", first_wide, Schedule.GPIPE, **common),
    )
    answers = run_ranks(3, train_many, cases)
    expected = {name: value for rank in (0, 2) for name, value in answers[rank][0][0].items()}
    for answer in answers:
        for weights, _ in answer:
            for name, value in weights.items():
                assert numpy.abs(value - expected[name]).max() < 1e-10


def test_weights_that_are_computed_get_their_gradients_in_time() -> None:
    kinds = (Schedule.FLUSH, Schedule.ZERO_BUBBLE, Schedule.GPIPE)
    assert_same(*(Case("made weights", TWO, kind, steps=4, optimizer="sgd") for kind in kinds))


def test_a_gradient_that_others_read_is_not_written_over() -> None:
    """With one sample a microbatch, autograd keeps a view of what came from the peer, or is read later."""
    assert_same(
        Case("positions", TWO, Schedule.FLUSH, microbatches=6, samples=6, steps=4, optimizer="sgd"),
        Case("positions", TWO, Schedule.ZERO_BUBBLE, microbatches=6, samples=6, steps=4, optimizer="sgd"),
        Case("positions", TWO, Schedule.STASH, microbatches=6, samples=6, steps=4, optimizer="sgd"),
        Case("reshaped", TWO, Schedule.ZERO_BUBBLE, microbatches=6, samples=6, steps=4, optimizer="sgd"),
    )


def test_two_buffers_take_deeper_stages_than_their_batch() -> None:
    """A deeper warm-up needs a larger batch between two updates: every microbatch is one batch behind."""
    case = Case("cnn", TWO, Schedule.TWO_BUFFERED, microbatches=2, steps=24, depths={0: 12})
    assert_same(case, tolerance=1e-13)


FOLDED, MIXED, NEIGHBOURS = (((0,), (1,), (0,)),), (((0,), (1,), (0, 1)),), (((0,), (0,), (1,)),)


def test_workers_that_hold_several_stages_equal_plain_training() -> None:
    assert_same(
        Case("transformer", FOLDED, Schedule.FLUSH, steps=3),
        Case("transformer", FOLDED, Schedule.GPIPE, steps=3),
        Case("cnn", FOLDED, Schedule.NONE, steps=3),
        Case("lstm", MIXED, Schedule.FLUSH, steps=3),
        Case("transformer", FOLDED, Schedule.ZERO_BUBBLE, steps=3),
        Case("cnn", NEIGHBOURS, Schedule.ZERO_BUBBLE, steps=3),
        Case("lstm", MIXED, Schedule.ZERO_BUBBLE, steps=3, microbatches=5),
    )


def test_workers_that_hold_several_stages_equal_the_same_delayed_gradients() -> None:
    rounds = {"steps": 4, "microbatches": 5}
    tied = Case("transformer", FOLDED, Schedule.STASH, **rounds)
    assert_same(
        Case("cnn", FOLDED, Schedule.STASH, recompute=frozenset({0, 2}), **rounds),
        Case("cnn", FOLDED, Schedule.STASH, vertical_sync=True, **rounds),
        Case("cnn", FOLDED, Schedule.TWO_BUFFERED, **rounds),
        tied,
        replace(tied, schedule=Schedule.TWO_BUFFERED),
        Case("lstm", NEIGHBOURS, Schedule.STASH, depths={0: 4}, **rounds),
        Case("lstm", NEIGHBOURS, Schedule.TWO_BUFFERED, **rounds),
        tolerance=1e-12,
    )


def test_replicas_that_hold_several_stages_equal_the_same_delayed_gradients() -> None:
    crossed, side_by_side = (((0, 1), (2, 3), (1, 0)),), (((0,), (1,), (0,)), ((2,), (3,), (3,)))
    rounds = {"steps": 3, "microbatches": 5, "optimizer": "sgd"}
    both = (Schedule.STASH, Schedule.TWO_BUFFERED)
    assert_same(
        *(Case("cnn", (((0, 1, 2), (3,), (1, 2)),), kind, **rounds) for kind in both),
        *(Case("transformer", crossed, kind, **rounds) for kind in both),
        *(Case("transformer", side_by_side, kind, **rounds) for kind in both),
        tolerance=1e-12,
        skip=("running_mean", "running_var", "num_batches_tracked"),
    )
