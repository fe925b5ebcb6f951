"""Synchronous pipelines take the same steps as one process that accumulates over the same microbatches."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import numpy
import pytest

from plait.core.splits import split
from plait.planner.schedules.in_flight import Schedule
from support.pipelines import Case, Delayed, train_many, train_plainly
from support.world import run_ranks

TWO = (((0,), (1,)),)
THREE = (((0,), (1,), (2,)),)
SPREAD = (((0, 1), (2,)),)
MODELS = ["cnn", "lstm", "transformer"]
# Which samples BatchNorm sees depends on the replicas.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def each(*cases: Case, worlds: int = 1, more: tuple[Case, ...] = ()) -> Any:
    """A test of each of `cases`, which are trained in as many `worlds`; the test also gets its own.

    `more` are further models under what others show: they are for `make test-all`, in a world of their own.
    """
    found = []
    for own in split(len(cases), worlds):
        world = cases[own.start : own.stop]
        found += [pytest.param(case, world, id=_id(case)) for case in world]
    found += [pytest.param(case, more, id=_id(case), marks=pytest.mark.extended) for case in more]
    return pytest.mark.parametrize(("case", "world"), found)


def _id(case: Case) -> str:
    """What sets the case apart from one with nothing but defaults."""
    changed = [f for f in fields(Case) if f.default is not MISSING and getattr(case, f.name) != f.default]
    layouts = "|".join(" ".join("".join(map(str, workers)) for workers in stages) for stages in case.layouts)
    given = [f"{f.name}={_shown(getattr(case, f.name))}" for f in changed if f.name != "schedule"]
    depths = [f"depths={_shown(case.depths)}"] if case.depths else []
    return ", ".join([case.model, case.schedule.value, layouts, *given, *depths])


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (frozenset, tuple, dict)) else str(value)


_trained: dict[int, list[Any]] = {}


def trained(world: tuple[Case, ...]) -> list[Any]:
    """What each rank came to in each of the cases; worlds cost more to start than most cases."""
    if id(world) not in _trained:
        ranks = max(w for case in world for stages in case.layouts for ws in stages for w in ws) + 1
        _trained[id(world)] = run_ranks(ranks, train_many, world, deadline_s=100)
    return _trained[id(world)]


def assert_same(
    case: Case, world: tuple[Case, ...], tolerance: float = 1e-10, skip: tuple[str, ...] = ("\0",)
) -> None:
    """Every rank's weights and buffers are those of one process, and together they are all of them.

    `skip` ends the names of what need not agree.
    """
    number = next(number for number, other in enumerate(world) if other is case)
    expected = train_plainly(case) if case.schedule.synchronous else Delayed(case).train()
    found: dict[str, Any] = {}
    for weights, _ in (answer[number] for answer in trained(world)):
        for name, value in weights.items():
            difference = numpy.abs(value - expected[name]).max() if value.size else 0.0
            assert name.endswith(skip) or difference <= tolerance, f"{name} by {difference}"
        found |= weights
    assert found.keys() == expected.keys()


SYNCHRONOUS = (Schedule.FLUSH, Schedule.GPIPE, Schedule.ZERO_BUBBLE, Schedule.NONE)
ASYNCHRONOUS = (Schedule.STASH, Schedule.TWO_BUFFERED)
FEW = {"steps": 5, "microbatches": 5, "optimizer": "sgd"}


# Every schedule with one model, and every model.
SHOWN = {"cnn": SYNCHRONOUS[::3], "lstm": SYNCHRONOUS[1:2], "transformer": SYNCHRONOUS[2:3]}


@each(
    *(Case(model, THREE, kind) for model in MODELS for kind in SHOWN[model]),
    more=tuple(
        Case(model, THREE, kind) for model in MODELS for kind in SYNCHRONOUS if kind not in SHOWN[model]
    ),
)
def test_synchronous_pipelines_equal_plain_training(case: Case, world: tuple[Case, ...]) -> None:
    assert_same(case, world)


TURNS = (((0,), (1,), (0,), (1,)),)


@each(
    *(Case(model, TURNS, Schedule.INTERLEAVED, microbatches=5) for model in ("cnn", "transformer")),
    more=(Case("lstm", TURNS, Schedule.INTERLEAVED, microbatches=5),),
)
def test_interleaved_stages_equal_plain_training(case: Case, world: tuple[Case, ...]) -> None:
    assert_same(case, world)


@each(
    *(Case(model, THREE, kind) for model, kind in zip(MODELS[1:], ASYNCHRONOUS)),
    Case("cnn", THREE, Schedule.STASH, vertical_sync=True, optimizer="sgd"),
    Case("cnn", THREE, Schedule.TWO_BUFFERED, 2, optimizer="sgd"),
    more=(
        *(Case(model, THREE, kind) for model, kind in zip(MODELS[1:], ASYNCHRONOUS[::-1])),
        *(Case("cnn", THREE, kind) for kind in ASYNCHRONOUS),
        *(Case(model, THREE, Schedule.STASH, vertical_sync=True, optimizer="sgd") for model in MODELS[1:]),
        *(Case(model, THREE, Schedule.TWO_BUFFERED, 2, optimizer="sgd") for model in MODELS[1:]),
    ),
)
def test_weight_stashing_equals_the_same_delayed_gradients_in_one_process(
    case: Case, world: tuple[Case, ...]
) -> None:
    assert_same(case, world, tolerance=1e-13)


# workloads/test_examples.py trains it under both, on text.
@each(
    more=(
        Case("gnmt", TWO, Schedule.FLUSH, steps=3),
        Case("gnmt", TWO, Schedule.STASH, steps=3, microbatches=2),
    )
)
def test_translation_with_lengths_that_change_equals_one_process(case: Case, world: tuple[Case, ...]) -> None:
    assert_same(case, world)


@each(
    Case("lstm", (((0, 1, 2), (3,)),), Schedule.ZERO_BUBBLE, microbatches=4),
    Case("transformer", (((0,), (1,)), ((2,), (3,))), Schedule.FLUSH, microbatches=5),
    Case("lstm", (((0,), (1,)), ((2,), (3,))), Schedule.GPIPE, microbatches=1, steps=3),
    Case("transformer", (((0,), (1, 2, 3)),), Schedule.FLUSH, microbatches=5, clip_norm=0.1),
    more=(
        # The same with other schedules and models, and without clipping.
        Case("transformer", (((0, 1), (2,), (3,)),), Schedule.FLUSH, microbatches=5),
        Case("lstm", (((0,), (1, 2, 3)),), Schedule.GPIPE, microbatches=5),
        Case("transformer", (((0, 1, 2, 3),),), Schedule.FLUSH, microbatches=6, clip_norm=0.1),
        Case("lstm", (((0,), (1,), (2,), (3,)),), Schedule.FLUSH, clip_norm=0.05),
    ),
)
def test_replicated_stages_and_pipelines_side_by_side_equal_plain_training(
    case: Case, world: tuple[Case, ...]
) -> None:
    """Numbers of microbatches that no number of replicas divides; BatchNorm's statistics would differ."""
    assert_same(case, world)


@each(
    Case("transformer", (((0, 1), (2,), (3,)),), Schedule.TWO_BUFFERED, **FEW),
    Case("lstm", (((0,), (1,)), ((2,), (3,))), Schedule.STASH, **FEW),
    Case("cnn", (((0, 1), (2,), (3,)),), Schedule.STASH, vertical_sync=True, **FEW),
    Case("cnn", (((0,), (1, 2, 3)),), Schedule.STASH, recompute=frozenset({1}), **FEW),
    Case("positions", (((0, 1), (2, 3)),), Schedule.STASH, samples=5, **FEW),
    Case("transformer", (((0, 1), (2, 3)),), Schedule.STASH, cores=1, **FEW),
    more=(
        # The same layout with a stage that computes its activations again, and the same schedules, stay.
        Case("transformer", (((0, 1), (2, 3)),), Schedule.STASH, **FEW),
        Case("cnn", (((0,), (1, 2, 3)),), Schedule.STASH, **FEW),
        Case("cnn", (((0, 1), (2,), (3,)),), Schedule.STASH, **FEW),
        Case("lstm", (((0,), (1,)), ((2,), (3,))), Schedule.TWO_BUFFERED, **FEW),
        Case("transformer", (((0, 1), (2,), (3,)),), Schedule.TWO_BUFFERED, cores=1, **FEW),
    ),
)
def test_replicated_stages_under_stashing_equal_the_same_delayed_gradients(
    case: Case, world: tuple[Case, ...]
) -> None:
    assert_same(case, world, tolerance=1e-12, skip=STATISTICS)


CLIPPED = {"optimizer": "sgd", "clip_norm": 0.02}


@each(
    Case("transformer", THREE, Schedule.TWO_BUFFERED, **CLIPPED),
    Case("cnn", SPREAD, Schedule.STASH, **CLIPPED),
    more=(
        Case("lstm", THREE, Schedule.STASH, **CLIPPED),
        Case("cnn", (((0,), (1,), (2,), (0,)),), Schedule.STASH, **CLIPPED),
    ),
)
def test_stages_that_never_drain_clip_their_own_gradients(case: Case, world: tuple[Case, ...]) -> None:
    """What stages share is clipped apart."""
    assert_same(case, world, tolerance=1e-12, skip=STATISTICS)


EVERYWHERE = frozenset({0, 1, 2})


@each(
    Case("cnn", THREE, Schedule.STASH, recompute=frozenset({0, 2})),
    Case("transformer", THREE, Schedule.ZERO_BUBBLE, recompute=EVERYWHERE),
    Case("transformer", THREE, Schedule.FLUSH, depths={0: 4, 1: 3}, hosts=("a", "b", "a")),
    Case("lstm", THREE, Schedule.STASH, depths={0: 5, 1: 3}, hosts=("a", "b", "c")),
    more=(Case("cnn", THREE, Schedule.FLUSH, recompute=EVERYWHERE),),
)
def test_recompute_deeper_warm_up_and_gloo_between_hosts_change_nothing(
    case: Case, world: tuple[Case, ...]
) -> None:
    assert_same(case, world, tolerance=1e-12)


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


@each(
    *(
        Case("made weights", TWO, kind, optimizer="sgd")
        for kind in (Schedule.FLUSH, Schedule.ZERO_BUBBLE, Schedule.GPIPE)
    )
)
def test_weights_that_are_computed_get_their_gradients_in_time(case: Case, world: tuple[Case, ...]) -> None:
    assert_same(case, world)


SINGLE = {"microbatches": 6, "samples": 6, "optimizer": "sgd"}


@each(
    Case("positions", TWO, Schedule.FLUSH, **SINGLE),
    Case("positions", TWO, Schedule.ZERO_BUBBLE, **SINGLE),
    Case("positions", TWO, Schedule.STASH, **SINGLE),
    Case("reshaped", TWO, Schedule.ZERO_BUBBLE, **SINGLE),
)
def test_a_gradient_that_others_read_is_not_written_over(case: Case, world: tuple[Case, ...]) -> None:
    """With one sample a microbatch, autograd keeps a view of what came from the peer, or is read later."""
    assert_same(case, world)


@each(Case("cnn", TWO, Schedule.TWO_BUFFERED, microbatches=2, steps=24, depths={0: 12}))
def test_two_buffers_take_deeper_stages_than_their_batch(case: Case, world: tuple[Case, ...]) -> None:
    """A deeper warm-up needs a larger batch between two updates: every microbatch is one batch behind."""
    assert_same(case, world, tolerance=1e-13)


FOLDED, MIXED, NEIGHBOURS = (((0,), (1,), (0,)),), (((0,), (1,), (0, 1)),), (((0,), (0,), (1,)),)


@each(
    Case("cnn", FOLDED, Schedule.NONE, steps=3),
    Case("lstm", MIXED, Schedule.FLUSH, steps=3),
    Case("transformer", FOLDED, Schedule.ZERO_BUBBLE, steps=3),
    Case("cnn", NEIGHBOURS, Schedule.ZERO_BUBBLE, steps=3),
    more=(
        Case("transformer", FOLDED, Schedule.GPIPE, steps=3),
        Case("transformer", FOLDED, Schedule.FLUSH, steps=3),
        Case("lstm", MIXED, Schedule.ZERO_BUBBLE, steps=3, microbatches=5),
    ),
)
def test_workers_that_hold_several_stages_equal_plain_training(case: Case, world: tuple[Case, ...]) -> None:
    assert_same(case, world)


FEWER = {"microbatches": 5}


@each(
    Case("cnn", FOLDED, Schedule.STASH, recompute=frozenset({0, 2}), **FEWER),
    Case("cnn", FOLDED, Schedule.STASH, vertical_sync=True, **FEWER),
    Case("cnn", FOLDED, Schedule.TWO_BUFFERED, **FEWER),
    Case("lstm", NEIGHBOURS, Schedule.STASH, depths={0: 4}, **FEWER),
    more=(
        *(Case("transformer", FOLDED, kind, **FEWER) for kind in ASYNCHRONOUS),
        Case("lstm", NEIGHBOURS, Schedule.TWO_BUFFERED, **FEWER),
    ),
)
def test_workers_that_hold_several_stages_equal_the_same_delayed_gradients(
    case: Case, world: tuple[Case, ...]
) -> None:
    assert_same(case, world, tolerance=1e-12)


CROSSED, SIDE_BY_SIDE = (((0, 1), (2, 3), (1, 0)),), (((0,), (1,), (0,)), ((2,), (3,), (3,)))


UNEVEN = (((0, 1, 2), (3,), (1, 2)),)
LAYOUTS = (("cnn", UNEVEN), ("transformer", CROSSED), ("transformer", SIDE_BY_SIDE))
FEWEST = {"steps": 3, "microbatches": 5, "optimizer": "sgd"}


@each(
    *(Case(*both, kind, **FEWEST) for both, kind in zip(LAYOUTS, (*ASYNCHRONOUS, Schedule.STASH))),
    more=tuple(
        Case(*both, kind, **FEWEST)
        for both, kind in zip(LAYOUTS, (*ASYNCHRONOUS[::-1], Schedule.TWO_BUFFERED))
    ),
)
def test_replicas_that_hold_several_stages_equal_the_same_delayed_gradients(
    case: Case, world: tuple[Case, ...]
) -> None:
    assert_same(case, world, tolerance=1e-12, skip=STATISTICS)
