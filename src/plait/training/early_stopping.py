"""Early stopping: how long evaluations may go on without a gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from plait.schema.settings import EarlyStopSettings
from plait.workloads.metrics import LOWER_IS_BETTER


@dataclass
class EarlyStopping:
    """The best value so far of what `rule` watches, and how many evaluations brought nothing better."""

    rule: EarlyStopSettings | None = None
    best: float | None = None
    without_gain: int = 0

    def update(self, metrics: Mapping[str, float]) -> None:
        """Count an evaluation that brought no gain."""
        if self.rule is None or not metrics:
            return
        value = metrics[self.rule.metric]
        if self.best is None or gain(self.rule.metric, value, self.best) > self.rule.min_change:
            self.best, self.without_gain = value, 0
        else:
            self.without_gain += 1

    def should_stop(self) -> bool:
        return self.rule is not None and self.without_gain >= self.rule.patience


def gain(name: str, value: float, before: float) -> float:
    """How much better `value` is: smaller for a loss or perplexity, larger for others; no number is worst."""
    if not math.isfinite(value):
        return -math.inf
    if not math.isfinite(before):
        return math.inf
    return before - value if name in LOWER_IS_BETTER else value - before
