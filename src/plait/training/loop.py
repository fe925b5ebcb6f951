"""The loop of every run and every sweep: a list of trials, driven with one engine.

The engine computes steps; the loop tracks the progress of trials and what is due after which step. Subclasses
differ in where trials come from and where results go: `RunLoop` trains one trial, `SweepLoop` the trials that
a coordinator assigns.
"""

from __future__ import annotations

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from plait.training.engine import IntervalResult, TrialsEngine
from plait.training.trial import Due, Trial


def freeze_garbage_collector() -> None:
    """Exclude all existing objects from garbage collection, which would otherwise pause steps."""
    gc.collect()
    gc.freeze()


class Loop(ABC):
    """Trains `trials` with `engine`; all workers of a group call each method together."""

    engine: TrialsEngine

    @property
    @abstractmethod
    def trials(self) -> Sequence[Trial]:
        """The trials in training, in the order of the engine's slots."""

    @abstractmethod
    def ended(self) -> str | None:
        """Why training ends: `finished`, `stopped`, ...; None while it continues."""

    @abstractmethod
    def apply_changes(self) -> None:
        """Apply requested changes of settings, workers or trials, between two steps."""

    @abstractmethod
    def steps_until_change(self) -> int | None:
        """Steps until the next possible change; None if unknown."""

    @abstractmethod
    def observe(self, result: IntervalResult) -> None:
        """Process the result of an interval; the trials have already advanced by its steps."""

    @abstractmethod
    def find_due(self) -> dict[int, Due]:
        """What is due now, by slot."""

    @abstractmethod
    def before_evaluation(self, due: Mapping[int, Due]) -> None:
        """Called before an evaluation, which may fail: save what must not be lost."""

    @abstractmethod
    def record_evaluation(self, metrics: Mapping[int, dict[str, float]], seconds: float) -> None:
        """Record the metrics of an evaluation, by slot."""

    @abstractmethod
    def after_evaluation(self, due: Mapping[int, Due], metrics: Mapping[int, dict[str, float]]) -> None:
        """Save and report what is due, with the metrics of the evaluation."""

    def take_steps(self) -> str:
        """Train until `ended` gives a reason, which is returned."""
        while (reason := self.ended()) is None:
            self.apply_changes()
            if (steps := self.steps_until_due()) > 0:
                self.advance(steps)
            self.evaluate_and_save()
        return reason

    def steps_until_due(self) -> int:
        """Steps until an evaluation, checkpoint or change is due; 0 if one is due now or no trial trains."""
        if not self.trials or any(trial.moved for trial in self.trials):
            return 0
        change = self.steps_until_change()
        steps = min(trial.steps_until_due() for trial in self.trials)
        return steps if change is None else min(steps, change)

    def advance(self, steps: int) -> None:
        """Take `steps` steps, or fewer if a worker is asked to stop or to change."""
        result = self.engine.train(steps)
        for trial, position in zip(self.trials, result.positions):
            trial.advance(result.steps, position)
        self.observe(result)

    def evaluate_and_save(self) -> None:
        """Do what is due after the last step; if a worker is lost, it stays due."""
        due = self.find_due()
        with self.undone_by_losses():
            self.before_evaluation(due)
            slots = [slot for slot, each in due.items() if each.evaluation or each.end]
            metrics = self.evaluate(slots)
            for slot in slots:
                if due[slot].evaluation:
                    self.trials[slot].early_stopping.update(metrics[slot])
            self.after_evaluation(due, metrics)
        for trial in self.trials:
            trial.moved = False

    def evaluate(self, slots: Sequence[int]) -> dict[int, dict[str, float]]:
        """Evaluate the trials in `slots` and record their metrics."""
        if not slots:
            return {}
        started = time.perf_counter()
        metrics = dict(zip(slots, self.engine.evaluate(slots)))
        self.record_evaluation(metrics, time.perf_counter() - started)
        return metrics

    @contextlib.contextmanager
    def undone_by_losses(self) -> Iterator[None]:
        """Restore the best metrics if a worker is lost during an evaluation or the checkpoint after it."""
        saved = [(trial, trial.best, replace(trial.early_stopping)) for trial in self.trials]
        try:
            yield
        except RuntimeError:
            for trial, best, early_stopping in saved:
                trial.best, trial.early_stopping = best, early_stopping
            raise
