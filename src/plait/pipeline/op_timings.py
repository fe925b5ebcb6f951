"""When each operation of a pipeline started and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.run_events import Operations
from plait.planner.schedules.operations import Backward, BackwardInput, BackwardWeight, Forward, Op, Update


@dataclass(frozen=True)
class OpTiming:
    """Start and end of one operation, in seconds since the epoch by the first worker's clock."""

    op: Op
    start: float
    end: float


_LETTERS: dict[type[Op], str] = {
    Forward: "F",
    Backward: "B",
    BackwardInput: "I",
    BackwardWeight: "W",
    Update: "U",
}


def operations_event(step: int, timings: Sequence[OpTiming]) -> Operations:
    """The event that records a worker's operations up to `step`."""
    ops = [timing.op for timing in timings]
    return Operations(
        step,
        "".join(_LETTERS[type(op)] for op in ops),
        tuple(op.stage for op in ops),
        tuple(op.version if isinstance(op, Update) else op.microbatch for op in ops),
        tuple(round(timing.start, 6) for timing in timings),
        tuple(round(timing.end, 6) for timing in timings),
    )
