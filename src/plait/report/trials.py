"""The trials of a sweep, as far as its events tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.core import run_events
from plait.core.events import Recorded


@dataclass
class TrialRow:
    """A trial of a sweep as far as it has come; `result` orders trials, less is better."""

    number: int
    values: dict[str, Any] = field(default_factory=dict)
    state: str = "running"
    step: int = 0
    result: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    losses: dict[int, float | None] = field(default_factory=dict)
    tests: dict[str, dict[int, float | None]] = field(default_factory=dict)
    why: str = ""


def trials_of(events: Sequence[Recorded]) -> tuple[TrialRow, ...]:
    """The trials of a sweep, best first."""
    rows: dict[int, TrialRow] = {}
    for each in events:
        event = each.event
        number = getattr(event, "trial", None)
        if number is None or not type(event).__name__.startswith("Trial"):
            continue
        row = rows.setdefault(number, TrialRow(number))
        if isinstance(event, (run_events.TrialDrawn, run_events.TrialCopied)):
            row.values = {**row.values, **event.values}
        elif isinstance(event, run_events.TrialStep):
            row.step, row.losses[event.step] = event.step, event.loss
        elif isinstance(event, run_events.TrialEvaluated):
            row.metrics = event.metrics
            for name, value in event.metrics.items():
                row.tests.setdefault(name, {})[event.step] = value
        elif isinstance(event, run_events.TrialReached):
            row.step, row.result = event.step, event.result
        elif isinstance(event, run_events.TrialEnded):
            row.step, row.state, row.why = event.step, event.state, event.why
            row.metrics = event.metrics or row.metrics
    return tuple(sorted(rows.values(), key=_rank))


def _rank(row: TrialRow) -> tuple[bool, int, float, int]:
    """Trials with a result before the others; those that have none yet by their last training loss."""
    loss = next(reversed(row.losses.values()), None)
    value = row.result if row.result is not None else loss
    return (
        row.result is None,
        -row.step,
        math.inf if value is None or math.isnan(value) else value,
        row.number,
    )
