"""Spans: when each operation of a pipeline began and ended, as it was carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.run_events import Operations
from plait.planner.schedules.operations import Backward, BackwardInput, BackwardWeight, Forward, Op, Update


@dataclass(frozen=True)
class OpTiming:
    """One operation as it was carried out, in seconds since the epoch by the first worker's clock."""

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


def operations_event(step: int, spans: Sequence[OpTiming]) -> Operations:
    """What a worker did up to `step`, as an event."""
    ops = [span.op for span in spans]
    return Operations(
        step,
        "".join(_LETTERS[type(op)] for op in ops),
        tuple(op.stage for op in ops),
        tuple(op.version if isinstance(op, Update) else op.microbatch for op in ops),
        tuple(round(span.start, 6) for span in spans),
        tuple(round(span.end, 6) for span in spans),
    )
