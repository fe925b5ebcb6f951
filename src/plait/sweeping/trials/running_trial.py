"""A trial that trains in an array: its progress, its losses and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.core.codec import finite, finite_numbers
from plait.training.checkpoint import EngineState
from plait.training.trial import Trial, present_steps

# How many points a learning curve has at most.
POINTS = 200


@dataclass(kw_only=True)
class RunningTrial(Trial):
    """A trial while it trains in an array. It reports when it has made `until` of its `steps`.

    `drawn` are the steps of its goals ahead at the batch size of the job, `goals` with its batch size; the
    last is its end.
    """

    drawn: Sequence[int]
    goals: Sequence[int] = ()
    # The names of the parameters that are trained.
    weights: frozenset[str] = frozenset()
    # The points of its learning curve at most, unless the job says after how many steps there is one. With 0
    # there is one where something else is due: workers that average weights synchronize at each point.
    points: int = POINTS
    loss_sum: float = 0.0
    loss_steps: int = 0
    train_loss: float | None = None
    # What its checkpoints say of its data.
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The steps after which it ends."""
        return self.goals[-1]

    def count_goals(self, samples: int | None) -> None:
        """Count the steps to its goals with its present batch size; an epoch has `samples`."""
        total = present_steps(self, samples) if self.batch.is_changed else self.drawn[-1]
        goals, step = [], self.step
        for drawn in self.drawn[:-1]:
            step = min(total, max(step + 1, self.batch.step_at(drawn)))
            goals.append(step)
        self.goals = [*goals, total]
        self.until = self.goals[0]

    def reach(self, until: int) -> None:
        """Go on from a goal to the next one."""
        self.drawn, self.goals, self.until = self.drawn[1:], self.goals[1:], until

    @property
    def is_loss_due(self) -> bool:
        """Whether the learning curve gets a point; fixed steps, so that a resumed trial has the same."""
        return self._loss_every is None or self.is_time(self._loss_every)

    @property
    def _loss_every(self) -> int | None:
        most = max(1, self.drawn[-1] // self.points) if self.points else None
        return self.settings.log_every_steps or most

    @property
    def periods(self) -> tuple[int | None, ...]:
        return self._loss_every, *super().periods

    @property
    def stops_early(self) -> bool:
        """Whether it ends early; also one that was killed between its last checkpoint and that record."""
        return super().stops_early and self.step < self.steps

    @property
    def has_diverged(self) -> bool:
        """Whether its loss is no number, also since the curve's last point."""
        return self.latest_loss is not None and not math.isfinite(self.latest_loss)

    def add_losses(self, total: float, steps: int) -> None:
        self.loss_sum += total
        self.loss_steps += steps

    @property
    def latest_loss(self) -> float | None:
        """The mean loss since the curve's last point, or that point where nothing came after it."""
        return self.loss_sum / self.loss_steps if self.loss_steps else self.train_loss

    def take_mean_loss(self) -> float:
        """The mean loss since the last time this was asked."""
        mean = self.loss_sum / self.loss_steps if self.loss_steps else math.nan
        self.loss_sum, self.loss_steps = 0.0, 0
        self.train_loss = mean
        return mean

    def result(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What it is compared by, for the coordinator, if an evaluation has given these metrics."""
        loss = self.latest_loss
        return {"metrics": finite_numbers(metrics), "train_loss": None if loss is None else finite(loss)}

    def load(self, step: int, progress: Mapping[str, Any]) -> None:
        super().load(step, progress)
        self.loss_sum, self.loss_steps = progress["loss_sum"], progress["loss_steps"]
        self.train_loss = progress["train_loss"]

    def saved(self, state: EngineState) -> dict[str, Any]:
        """What a checkpoint stores besides tensors: as for a single run, and the unreported loss."""
        return {
            **self.progress(state.loss_scale, workers=1),
            **self.data,
            # Trials that are not fused draw random numbers by their step.
            "age": state.age or self.step,
            "loss_sum": self.loss_sum,
            "loss_steps": self.loss_steps,
            "train_loss": self.train_loss,
        }
