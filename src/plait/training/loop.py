"""The loop of every run and every sweep: a list of trials, driven with one engine.

How steps are computed is the engine's business; what is due after which step, and the progress of trials, is
the loop's. What differs is where trials come from and who keeps their results: `RunLoop` has one of its own,
`SweepLoop` those that a coordinator hands out.
"""

from __future__ import annotations

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from plait.training.checkpoint import EngineState
from plait.training.engine import IntervalResult
from plait.training.trial import Due, Trial


def keep_what_was_built() -> None:
    """Exclude all existing objects from garbage collection, which would otherwise pause steps."""
    gc.collect()
    gc.freeze()


class TrialsEngine(Protocol):
    """What the loop asks of an engine; slots number its trials."""

    def train(self, steps: int) -> IntervalResult:
        """Take that many steps, or fewer if someone is asked to stop or the data ends."""

    def evaluate(self, slots: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss and metric of the trials in `slots` over the test split, the same on all workers."""

    def state(self, slot: int) -> EngineState | None:
        """The state of the trial in `slot`, on the worker that writes checkpoints."""


class Loop(ABC):
    """Trains `trials` with `engine`; where several workers do, all of them call each method together."""

    engine: TrialsEngine

    @property
    @abstractmethod
    def trials(self) -> Sequence[Trial]:
        """The trials that train now, in the engine's order."""

    @abstractmethod
    def ended(self) -> str | None:
        """Why training ends here: `finished`, `stopped`, ...; None while it goes on."""

    @abstractmethod
    def apply_changes(self) -> None:
        """Change, between two steps, what is asked to be changed: settings, workers, trials."""

    @abstractmethod
    def steps_until_change(self) -> int | None:
        """Steps until something may have to be changed; None where nothing is known of that."""

    @abstractmethod
    def observe(self, result: IntervalResult) -> None:
        """Take note of what came of an interval, whose steps the trials have made."""

    @abstractmethod
    def find_due(self) -> dict[int, Due]:
        """What is to be done now, by slot."""

    @abstractmethod
    def before_evaluation(self, due: Mapping[int, Due]) -> None:
        """Do what must not wait for an evaluation, which may fail."""

    @abstractmethod
    def record_evaluation(self, metrics: Mapping[int, dict[str, float]], seconds: float) -> None:
        """Record what an evaluation found, by slot."""

    @abstractmethod
    def after_evaluation(self, due: Mapping[int, Due], metrics: Mapping[int, dict[str, float]]) -> None:
        """Save and report what is due, with what was evaluated of it."""

    def take_steps(self) -> str:
        """Train to the end or until asked to stop, which is returned."""
        while (reason := self.ended()) is None:
            self.apply_changes()
            if (steps := self.steps_until_due()) > 0:
                self.advance(steps)
            self.evaluate_and_save()
        return reason

    def steps_until_due(self) -> int:
        """Steps until something is due besides training; 0 where something is now, or nothing trains."""
        if not self.trials or any(trial.moved for trial in self.trials):
            return 0
        change = self.steps_until_change()
        steps = min(trial.steps_until_due() for trial in self.trials)
        return steps if change is None else min(steps, change)

    def advance(self, steps: int) -> None:
        """Have the engine take that many steps, or fewer where a worker is asked for something else."""
        result = self.engine.train(steps)
        for trial, position in zip(self.trials, result.positions):
            trial.advance(result.steps, position)
        self.observe(result)

    def evaluate_and_save(self) -> None:
        """Do what is due after the last step; again where a worker is lost meanwhile."""
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
        """Evaluate the trials in `slots`, and record what that found."""
        if not slots:
            return {}
        started = time.perf_counter()
        metrics = dict(zip(slots, self.engine.evaluate(slots)))
        self.record_evaluation(metrics, time.perf_counter() - started)
        return metrics

    @contextlib.contextmanager
    def undone_by_losses(self) -> Iterator[None]:
        """Forget what an evaluation said where a worker is lost in it, or in the checkpoint after it."""
        kept = [(trial, trial.best, replace(trial.early_stopping)) for trial in self.trials]
        try:
            yield
        except RuntimeError:
            for trial, best, early_stopping in kept:
                trial.best, trial.early_stopping = best, early_stopping
            raise
