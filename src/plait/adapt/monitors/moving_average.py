"""Bias-corrected moving averages."""

from __future__ import annotations

import math


class MovingAverage:
    """An exponential moving average, corrected for having started at zero (as Adam's moments are).

    Values that are not finite are skipped.
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay: found {decay}, expected a number from 0 to below 1")
        self._decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def update(self, value: float) -> None:
        if math.isfinite(value):
            self._sum = self._decay * self._sum + (1 - self._decay) * value
            self._weight = self._decay * self._weight + (1 - self._decay)

    @property
    def value(self) -> float | None:
        """The average so far; None before the first value."""
        return self._sum / self._weight if self._weight else None

    def state(self) -> tuple[float, float]:
        """The state for `load`."""
        return self._sum, self._weight

    def load(self, state: tuple[float, float]) -> None:
        self._sum, self._weight = state
