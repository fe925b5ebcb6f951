"""Early stopping: end training when evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.schema.settings import EarlyStopSettings, Mode


@dataclass
class EarlyStopping:
    """The best value so far of the watched metric, and the number of evaluations without an improvement.

    `modes` says of each metric whether less or more is better.
    """

    rule: EarlyStopSettings | None = None
    modes: Mapping[str, Mode] = field(default_factory=dict)
    best: float | None = None
    without_gain: int = 0

    def update(self, metrics: Mapping[str, float]) -> None:
        """Count an evaluation that brought no gain."""
        if self.rule is None or not metrics:
            return
        value, mode = metrics[self.rule.metric], self.modes[self.rule.metric]
        if self.best is None or gain(mode, value, self.best) > self.rule.min_change:
            self.best, self.without_gain = value, 0
        else:
            self.without_gain += 1

    def should_stop(self) -> bool:
        return self.rule is not None and self.without_gain >= self.rule.patience


def gain(mode: Mode, value: float, before: float) -> float:
    """How much better `value` is than the best; NaN is worst."""
    if not math.isfinite(value):
        return -math.inf
    if not math.isfinite(before):
        return math.inf
    return before - value if mode == "min" else value - before
