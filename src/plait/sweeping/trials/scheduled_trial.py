"""A trial of a sweep as its scheduler knows it: its values, its goals, and what it came to at them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.core import run_events
from plait.schema.settings import TrainSettings

ENDED = ("finished", "early-stop", "dropped", "diverged", "failed")


@dataclass
class ScheduledTrial:
    """One trial: `state` is waiting, running, held (until others reach the same rung) or one of `ENDED`."""

    number: int
    values: Mapping[str, Any]
    settings: TrainSettings
    group: str
    # The steps after which it is compared with others, as drawn; the last is its end.
    drawn: list[int]
    # The same with the batch sizes that it has had.
    goals: list[int]
    state: str = "waiting"
    # The worker that trains it, while it is running.
    worker: int | None = None
    step: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)
    train_loss: float | None = None
    # Why it failed.
    why: str = ""
    # Results by rung: the goals at which trials are compared.
    reached: dict[int, float] = field(default_factory=dict)
    # By rung, among how many results it is judged: those before it, and those that arrived with it.
    judged: dict[int, int] = field(default_factory=dict)

    def load_result(self, report: Report | run_events.TrialReached | run_events.TrialEnded) -> None:
        """Set the step and the results of a report."""
        self.step, self.metrics, self.train_loss = report.step, dict(report.metrics), report.train_loss

    def is_of(self, worker: int) -> bool:
        """Whether `worker` trains it; a question of a lost worker may arrive when others have its trials."""
        return self.state == "running" and self.worker == worker

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def steps(self) -> int:
        """The steps after which it ends."""
        return self.goals[-1]

    @property
    def rung(self) -> int:
        """The rung of its next goal."""
        return min(len(self.reached), self.last)

    @property
    def last(self) -> int:
        """The rung of its last goal, where it ends."""
        return len(self.goals) - 1

    @property
    def goal(self) -> int:
        """The next step at which it is compared."""
        return self.goals[self.rung]

    def rung_at(self, step: int) -> int:
        """The rung of the goal at `step`; a trial that ends between two goals counts as at the next."""
        return next(number for number, goal in enumerate(self.goals) if step <= goal)

    @property
    def result(self) -> float:
        """The latest result; less is better."""
        return self.reached[max(self.reached)] if self.reached else math.nan

    @property
    def is_complete(self) -> bool:
        return self.state in ("finished", "early-stop")

    def standing(self) -> tuple[Any, ...]:
        """Sort key, best first; ties are ordered by number."""
        unknown = math.isnan(self.result) or self.state in ("diverged", "failed")
        progress = 0 if self.is_complete else -self.step
        rank = (self.state == "failed", unknown, not self.is_complete, progress)
        return (*rank, number_of(self.result), self.number)


@dataclass(frozen=True)
class Report:
    """The result of a trial at a goal or at its end; not `has_result`: nothing to compare."""

    trial: int
    step: int
    metrics: Mapping[str, Any]
    train_loss: float | None
    has_result: bool = True


def number_of(result: float) -> float:
    """A result to compare: one that is not a number is worse than all others."""
    return math.inf if math.isnan(result) else result
