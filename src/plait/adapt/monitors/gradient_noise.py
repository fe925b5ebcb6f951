"""Gradient noise scale and gradient variance from squared norms.

The gradient of a batch of b samples is the true gradient G plus noise whose covariance has the trace S/b
(McCandlish et al., 2018). So the squared norm of a part's gradient exceeds that of the whole batch's, and
from both follow S, the variance of the gradient of one sample, and |G|²:

    parts = sum of w |g|² over parts, each of which has the share w of the batch
    E[parts] = W |G|² + n S / B        for n parts with the shares W together
    E[whole] =   |G|² +   S / B

S / |G|² is the noise scale: about the batch size up to which larger batches pay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.adapt.monitors.averages import MovingAverage

DECAY = 0.98
# Where less than this share of the mean squared norm is gradient, only a bound of the noise scale is known.
LEAST_SIGNAL = 0.01


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradient.

    `parts` is the sum of w |g|² over `count` parts of the batch, g being the mean gradient of a part and w
    its share of the batch's `samples`; `weight` is the sum of w. `whole` is the squared norm of the whole
    batch's mean gradient.
    """

    parts: float
    weight: float
    count: float
    whole: float
    samples: float


@dataclass(frozen=True)
class GradientMoments:
    """Unbiased estimates from one step; either may be negative, being a difference.

    `variance` is the trace of the covariance of one sample's gradient, `squared_norm` that of the true
    gradient.
    """

    variance: float
    squared_norm: float


def estimate(norms: GradientNorms) -> GradientMoments | None:
    """What one step tells; None where its parts are the whole, or a norm is no number."""
    spread = norms.count - norms.weight
    if spread < 1e-9 or not math.isfinite(norms.parts) or not math.isfinite(norms.whole):
        return None
    variance = (norms.parts - norms.weight * norms.whole) * norms.samples / spread
    return GradientMoments(variance, norms.whole - variance / norms.samples)


class GradientAverages:
    """Moving averages of the moments of a run's gradients, and the noise scale that follows from them.

    Numerator and denominator are averaged apart: the mean of their quotients would be biased, and has no
    bound where |G|² comes close to zero.
    """

    def __init__(self, decay: float = DECAY) -> None:
        self._variance = MovingAverage(decay)
        self._squared_norm = MovingAverage(decay)
        self._whole = MovingAverage(decay)
        self.steps = 0

    def update(self, norms: GradientNorms) -> None:
        found = estimate(norms)
        if found is not None:
            self.add(found, norms.whole)

    def add(self, found: GradientMoments, whole: float) -> None:
        """Take in the moments of one step, whose gradient's squared norm was `whole`."""
        if math.isfinite(found.variance) and math.isfinite(found.squared_norm) and math.isfinite(whole):
            self._variance.update(found.variance)
            self._squared_norm.update(found.squared_norm)
            self._whole.update(whole)
            self.steps += 1

    @property
    def variance(self) -> float | None:
        """The trace of the covariance of one sample's gradient; None before the first step.

        Below zero where the steps so far cannot tell it from zero.
        """
        return self._variance.value

    @property
    def squared_norm(self) -> float | None:
        """The squared norm of the true gradient; below zero where noise hides it."""
        return self._squared_norm.value

    @property
    def noise_scale(self) -> float | None:
        """Samples; a lower bound where `note` says so, None before the first step."""
        variance, squared_norm, whole = self._variance.value, self._squared_norm.value, self._whole.value
        if variance is None or squared_norm is None or whole is None:
            return None
        least = LEAST_SIGNAL * whole
        if variance <= 0 or whole <= 0:
            return 0.0
        return variance / max(squared_norm, least)

    @property
    def note(self) -> str | None:
        """Why `noise_scale` is not the quotient of the averages, in words; None where it is."""
        variance, squared_norm, whole = self._variance.value, self._squared_norm.value, self._whole.value
        if variance is None or squared_norm is None or whole is None:
            return None
        if variance <= 0 or whole <= 0:
            return f"no noise seen: the variance is estimated as {variance:.3g}"
        if squared_norm < LEAST_SIGNAL * whole:
            return (
                f"at least: the squared norm of the gradient is estimated as {squared_norm:.3g}, less than "
                f"{LEAST_SIGNAL:.0%} of the batch's {whole:.3g}, and cannot be told from noise"
            )
        return None

    def state(self) -> list[float]:
        """What `load` goes on from, as plain numbers."""
        averages = (self._variance, self._squared_norm, self._whole)
        return [float(self.steps), *(number for each in averages for number in each.state())]

    def load(self, state: Sequence[float]) -> None:
        """Go on from a state; none of another length, as of a run that measured nothing."""
        if len(state) != len(self.state()):
            return
        self.steps = int(state[0])
        for i, each in enumerate((self._variance, self._squared_norm, self._whole)):
            each.load((state[1 + 2 * i], state[2 + 2 * i]))
