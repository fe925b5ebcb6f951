"""The progress of a sweep: the steps of its trials, how fast they are, which to show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from plait.adapt.progress_values import progress_of
from plait.core import run_events
from plait.core.codec import encode
from plait.core.events import Event
from plait.schema.results import TrialResult, plain
from plait.sweeping.array_record import Arrays
from plait.sweeping.scheduler import TrialScheduler

ROWS = 12
# The most arrays in one progress report.
LINES = 32
# The time left is reported only after steps were counted for this long.
SETTLED_S = 2.0


class SweepProgress:
    """Counts the steps of a sweep's trials, from the points of their learning curves and from reports."""

    def __init__(
        self,
        scheduler: TrialScheduler,
        arrays: Arrays,
        past: Iterable[Event] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._arrays = arrays
        # The last point of each trial's curve: its step and its loss.
        self._latest: dict[int, tuple[int, float | None]] = {
            event.trial: (event.step, event.loss) for event in past if isinstance(event, run_events.TrialStep)
        }
        self._started = clock()
        self._trial_steps = 0
        self._of_events: dict[str, Any] = {}
        # When the first points of this process were counted, and the steps up to them: what came before was
        # getting ready, and says nothing of the time that is left.
        self._first: tuple[float, int] | None = None

    def follow(self, event: Event) -> None:
        """Report what was changed by the event, if it is a change."""
        self._of_events |= progress_of(event)

    def count(self, trial: int, step: int, loss: float | None) -> None:
        """Count the steps of a trial up to `step`; `loss` is None if it is not known there."""
        before, known = self._latest.get(trial, (self._scheduler.trials[trial].step, None))
        self._trial_steps += max(0, step - before)
        if loss is None:
            self._latest[trial] = (max(before, step), known)
            return
        # It may have gone back to a checkpoint.
        self._latest[trial] = (step, loss)
        self._first = self._first or (self._clock(), self._trial_steps)

    @property
    def _left_per_step_s(self) -> float | None:
        """The seconds of a trial's step since the first points, once they were counted for a while."""
        if self._first is None:
            return None
        seconds, steps = self._clock() - self._first[0], self._trial_steps - self._first[1]
        return seconds / steps if steps > 0 and seconds >= SETTLED_S else None

    @property
    def seconds(self) -> float:
        """Since the sweep, or its resumed part, began."""
        return max(self._clock() - self._started, 1e-9)

    @property
    def trial_steps_per_s(self) -> float:
        return self._trial_steps / self.seconds

    @property
    def steps(self) -> dict[int, int]:
        """How many steps each trial has taken."""
        trials = self._scheduler.trials
        return {t.number: t.step if t.has_ended else max(t.step, self.step_of(t.number)) for t in trials}

    def table(self) -> tuple[TrialResult, ...]:
        """All trials, best first, with the steps that unfinished ones have taken."""
        steps = self.steps
        return tuple(self._row(row, steps) for row in self._scheduler.table())

    def report(self) -> dict[str, Any]:
        """The steps of all trials, and the best and running trials."""
        scheduler, steps = self._scheduler, self.steps
        total = sum(t.step if t.has_ended else t.steps for t in scheduler.trials)
        done = sum(steps.values())
        report: dict[str, Any] = {
            "step": done,
            "steps": total,
            "trials": scheduler.search.total,
            "ended": scheduler.ended,
            "trial_steps_per_s": round(self.trial_steps_per_s, 3),
            "rows": plain(self._shown()),
            "arrays": encode(self._arrays.table(LINES)),
            "failed": {str(t.number): t.why for t in scheduler.trials if t.state == "failed"},
            **self._of_events,
        }
        each_s = self._left_per_step_s
        return report if each_s is None else {**report, "left_s": round((total - done) * each_s, 1)}

    def _shown(self) -> list[TrialResult]:
        running = {trial.number for trial in self._scheduler.trials if trial.state == "running"}
        table = self.table()
        best = [row for row in table if row.trial not in running and row.state != "waiting"]
        going = [row for row in table if row.trial in running]
        return [*best[: ROWS - min(len(going), ROWS // 2)], *going][:ROWS]

    def _row(self, row: TrialResult, steps: Mapping[int, int]) -> TrialResult:
        loss = row.train_loss if row.train_loss is not None else self._latest.get(row.trial, (0, None))[1]
        return replace(row, step=steps[row.trial], train_loss=loss)

    def step_of(self, trial: int) -> int:
        """How far a trial is known to be."""
        return self._latest.get(trial, (0, None))[0]
