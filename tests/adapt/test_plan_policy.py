"""The policy that watches a pipeline's plan, by signals alone, and what it takes to change over."""

from __future__ import annotations

from typing import Any

import pytest

from plait.adapt.changes import Replan
from plait.adapt.policies.plan import AdaptivePlan
from plait.adapt.policies.policy import replay
from plait.core.errors import JobError
from plait.core.run_events import Signals
from plait.planner.replan import Replanned
from plait.training.change.replanning import why_to_move

PLANNED = (0.1, 0.2, 0.1)


def signals(steps: range, slow: tuple[float, ...], planned: tuple[float, ...] = PLANNED) -> list[Signals]:
    """Steps of workers that take `slow` times as long as planned, all of them twice that, with some noise."""
    found = []
    for step in steps:
        noise = 1 + 0.1 * (step % 3)
        work = tuple(2 * noise * factor * each for factor, each in zip(slow, planned))
        found.append(Signals(step, 1.0, 8, 1.0, 3, "all-reduce", "default", work_s=work, planned_s=planned))
    return found


def test_what_all_workers_take_more_than_planned_is_no_reason_to_plan_again():
    assert replay(AdaptivePlan(), signals(range(1, 60), (1.0, 1.2, 1.0))) == []


def test_one_worker_that_becomes_slower_is_planned_for_once():
    course = signals(range(1, 31), (1.0, 1.0, 1.0)) + signals(range(31, 90), (1.0, 3.0, 1.0))
    ((step, proposal),) = replay(AdaptivePlan(window=10), course)
    # Not before the whole window shows it: at half way a worker seems half as slow as it is.
    assert 31 + 5 <= step <= 31 + 10 + 10
    assert isinstance(proposal.change, Replan)
    assert proposal.change.slowness == pytest.approx((1.0, 3.0, 1.0), rel=0.1)
    assert "worker 1 takes" in proposal.why


def test_a_worker_that_becomes_slower_still_is_planned_for_again():
    course = signals(range(1, 41), (1.0, 2.0, 1.0)) + signals(range(41, 90), (1.0, 4.0, 1.0))
    found = replay(AdaptivePlan(window=10), course)
    assert [round(each.change.slowness[1]) for _, each in found] == [2, 4]


def test_times_under_another_plan_are_left_out():
    other = (0.2, 0.1, 0.1)
    course = signals(range(1, 8), (1.0, 3.0, 1.0)) + signals(range(8, 40), (1.0, 1.0, 1.0), other)
    assert replay(AdaptivePlan(window=10), course) == []


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({}, True),
        ({"gain": 0.6}, False),
        ({"steps_left": 3}, False),
        ({"steps_left": None}, True),
        ({"opening_s": 100.0}, False),
    ],
)
def test_layers_move_where_that_pays(change: dict[str, Any], moves: bool):
    found = Replanned(None, step_s=0.5, before_s=1.0, moved_bytes=1e9)  # type: ignore[arg-type]
    terms = {"gain": 0.1, "steps_left": 100, "opening_s": 1.0, "bytes_per_s": 1e9} | change
    assert (why_to_move(found, **terms) is not None) == moves


def test_wrong_numbers_are_refused():
    with pytest.raises(JobError, match="expected a threshold above 0"):
        AdaptivePlan(threshold=0.0)
