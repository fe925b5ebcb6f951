"""Adaptive batch size: batches grow with the gradient noise scale, and the learning rate with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from plait.adapt.changes import BatchSizeChange
from plait.adapt.policies.policy import Decision, Proposal
from plait.core.errors import JobError
from plait.core.run_events import Signals

LrRule = Literal["linear", "sqrt", "adascale", "none"]
# The relative change of AdaScale's gain that updates the learning rate between two changes of the batch size.
_GAIN_STEP = 0.1


@dataclass(frozen=True)
class BatchSizeState:
    """The job's batch size, and the step of the last change."""

    base: int
    changed_at: int


@dataclass(frozen=True)
class AdaptiveBatchSize:
    """Multiply the batch size by `factor`, up to `most`, if the noise scale allows it.

    It does if it is at least `threshold` times the larger batch. With `shrink` a batch that is larger than
    the noise scale by `factor` squared is reduced again, but not below the job's batch size. Changes are at
    least `every_steps` steps apart, so that the averages can adapt.
    """

    most: int
    factor: float = 2.0
    threshold: float = 1.0
    every_steps: int = 50
    lr: LrRule = "linear"
    shrink: bool = False
    state_type: ClassVar[type | None] = BatchSizeState

    def __post_init__(self) -> None:
        if self.factor <= 1 or self.most < 1 or self.every_steps < 1 or self.threshold <= 0:
            raise JobError(
                f"adapt: batch-size found most {self.most}, factor {self.factor}, threshold "
                f"{self.threshold} and every_steps {self.every_steps}; expected a factor above 1 and the "
                f"others above 0"
            )

    def decide(self, signals: Sequence[Signals], state: BatchSizeState | None) -> Decision:
        now = signals[-1]
        state = state or BatchSizeState(now.batch_size, now.step)
        if now.noise_scale is None or now.step < state.changed_at + self.every_steps:
            return Decision(state=state)
        size = self._next_size(now, state)
        gain = lr_gain(self.lr, now, size / state.base, state.base)
        is_same = self.lr != "adascale" or abs(gain / now.lr_factor - 1) < _GAIN_STEP
        if size == now.batch_size and is_same:
            return Decision(state=state)
        bound = "at least " if now.note else ""
        why = f"noise scale {bound}{now.noise_scale:.4g} at batch {now.batch_size}; lr rule {self.lr}"
        proposal = Proposal(BatchSizeChange(size, gain), why)
        return Decision((proposal,), replace(state, changed_at=now.step))

    def _next_size(self, now: Signals, state: BatchSizeState) -> int:
        assert now.noise_scale is not None
        larger = min(math.floor(now.batch_size * self.factor), self.most)
        if larger > now.batch_size and now.noise_scale >= self.threshold * larger:
            return larger
        if self.shrink and now.noise_scale * self.factor**2 < self.threshold * now.batch_size:
            return max(math.ceil(now.batch_size / self.factor), state.base)
        return now.batch_size


def lr_gain(rule: LrRule, now: Signals, scale: float, base: int) -> float:
    """The factor on the job's learning rate for batches `scale` times as large as the job's `base`."""
    if rule == "adascale":
        return _adascale(now, scale, base)
    return {"linear": scale, "sqrt": math.sqrt(scale), "none": 1.0}[rule]


def _adascale(now: Signals, scale: float, base: int) -> float:
    """AdaScale's gain: from 1, for gradients without noise, to `scale`, for mostly noise."""
    if now.variance is None or now.squared_norm is None or now.variance <= 0:
        return 1.0
    noise, signal = now.variance / base, max(now.squared_norm, 0.0)
    return (noise + signal) / (noise / scale + signal)
