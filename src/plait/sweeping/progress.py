"""The progress of a sweep: how many steps its trials have taken, how fast, and which trials to show."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.core import run_events
from plait.core.codec import encode
from plait.core.events import Recorded
from plait.schema.results import TrialResult
from plait.sweeping.array_record import Arrays
from plait.sweeping.scheduler import TrialScheduler

ROWS = 12
# The most arrays in one progress report.
LINES = 32


class SweepProgress:
    """Counts the steps of a sweep's trials from the points of their learning curves."""

    def __init__(self, scheduler: TrialScheduler, arrays: Arrays) -> None:
        self._scheduler = scheduler
        self._arrays = arrays
        # The last point of each trial's curve: its step and its loss.
        self._latest: dict[int, tuple[int, float | None]] = {}
        self._started = time.time()
        self._trial_steps = 0

    def load(self, past: Sequence[Recorded]) -> None:
        """Go on from the record of a sweep that another coordinator began."""
        for recorded in past:
            if isinstance(recorded.event, run_events.SweepStarted):
                self._started, self._trial_steps = recorded.t, 0
                self._latest.clear()
            elif isinstance(recorded.event, run_events.TrialStep):
                self.count(recorded.event)

    def count(self, event: run_events.TrialStep) -> None:
        before = self._latest.get(event.trial, (self._scheduler.trials[event.trial].step, None))[0]
        self._trial_steps += max(0, event.step - before)
        self._latest[event.trial] = (event.step, event.loss)

    @property
    def seconds(self) -> float:
        """Since the sweep, or its resumed part, began."""
        return max(time.time() - self._started, 1e-9)

    @property
    def trial_steps_per_s(self) -> float:
        return self._trial_steps / self.seconds

    @property
    def steps(self) -> dict[int, int]:
        """How many steps each trial has taken."""
        trials = self._scheduler.trials
        return {t.number: t.step if t.has_ended else max(t.step, self._step_of(t.number)) for t in trials}

    def report(self) -> dict[str, Any]:
        """The steps of all trials, and the best and running trials."""
        scheduler, steps, rate = self._scheduler, self.steps, self.trial_steps_per_s
        total = sum(t.step if t.has_ended else t.steps for t in scheduler.trials)
        done = sum(steps.values())
        found: dict[str, Any] = {
            "step": done,
            "steps": total,
            "trials": scheduler.search.total,
            "ended": scheduler.ended,
            "trial_steps_per_s": round(rate, 3),
            "rows": encode([self._row(row, steps) for row in self._shown()]),
            "arrays": encode(self._arrays.table(LINES)),
            "failed": {str(t.number): t.why for t in scheduler.trials if t.state == "failed"},
        }
        return {**found, "left_s": round((total - done) / rate, 1)} if rate > 0 else found

    def _shown(self) -> list[TrialResult]:
        running = {trial.number for trial in self._scheduler.trials if trial.state == "running"}
        table = self._scheduler.table()
        best = [row for row in table if row.trial not in running and row.state != "waiting"]
        going = [row for row in table if row.trial in running]
        return [*best[: ROWS - min(len(going), ROWS // 2)], *going][:ROWS]

    def _row(self, row: TrialResult, steps: Mapping[int, int]) -> TrialResult:
        loss = row.train_loss if row.train_loss is not None else self._latest.get(row.trial, (0, None))[1]
        return replace(row, step=steps[row.trial], train_loss=loss)

    def _step_of(self, trial: int) -> int:
        return self._latest.get(trial, (0, None))[0]
