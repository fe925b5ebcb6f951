"""Several runs next to each other: what each came to, its curves, and its settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.core import run_events
from plait.core.units import show_seconds
from plait.report.curves import Points, curves_of, decimated, points_of
from plait.report.record import RunRecorded
from plait.report.run_data import last_workers, show_steps
from plait.report.trials import trials_of
from plait.schema.results import show_metric

MOST_POINTS = 400


@dataclass(frozen=True)
class ComparedRun:
    """A run in a list of runs; `problem` says why one cannot be read, which then has nothing else.

    `result` has the last training loss and metrics by name, of a sweep those of its best trial, as have
    `curves`. `settings` are those of its job by key, without its name.
    """

    name: str
    state: str
    steps: str = "-"
    result: Mapping[str, str] = field(default_factory=dict)
    time: str = "-"
    workers: str = "-"
    curves: Mapping[str, Points] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def compared(
    name: str,
    state: str,
    recorded: RunRecorded,
    settings: Mapping[str, Any],
    progress: Mapping[str, Any] | None = None,
) -> ComparedRun:
    """What a list says of a run, by its events, the settings of its job and the progress in its status."""
    events = [each.event for each in recorded.events]
    curves, steps, workers = curves_of(recorded.events), "-", "-"
    for event in events:
        if isinstance(event, run_events.RunStarted):
            steps = show_steps(event, curves, progress or {})
            workers = str(last_workers(recorded.events, event.workers))
        elif isinstance(event, run_events.SweepStarted):
            trials = trials_of(recorded.events)
            ended = sum(trial.state != "running" for trial in trials)
            steps, workers = f"{ended} of {event.trials} trials", str(event.workers)
            tests = (
                {f"test {name}": points_of(test) for name, test in trials[0].tests.items()} if trials else {}
            )
            curves = {"training loss": points_of(trials[0].losses), **tests} if trials else {}
    ends = [e.seconds for e in events if isinstance(e, (run_events.RunEnded, run_events.SweepEnded))]
    seconds = sum(ends) or (recorded.events[-1].t - recorded.events[0].t if events else 0.0)
    result = {
        name: show_metric(name.removeprefix("test "), points[-1][1])
        for name, points in curves.items()
        if points and name.startswith(("training", "test"))
    }
    return ComparedRun(
        name,
        state,
        steps,
        result,
        show_seconds(seconds) if events else "-",
        workers,
        {name: decimated(points, MOST_POINTS) for name, points in curves.items() if points},
        {key: text for key, text in _flat(settings, "") if key != "name"},
    )


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Nested settings as `optimizer.lr` and text."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text[:200]
