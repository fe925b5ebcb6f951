"""Gradient noise scale and gradient variance from squared norms.

The gradient of a batch of b samples is the true gradient G plus noise whose covariance has the trace S/b
(McCandlish et al., 2018). So the squared norm of a part's gradient exceeds that of the whole batch, and
both together give S, the variance of the gradient of one sample, and |G|²:

    parts = sum of w |g|² over parts of the batch, w being the fraction of a part
    E[parts] = W |G|² + n S / B        for n parts whose fractions sum to W
    E[whole] =   |G|² +   S / B

S / |G|² is the noise scale: about the largest batch size that is still efficient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.adapt.monitors.moving_average import MovingAverage

DECAY = 0.98
# If |G|² is less than this fraction of the mean squared norm, only a lower bound of the noise scale is known.
LEAST_SIGNAL = 0.01


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradient.

    `parts` is the sum of w |g|² over `count` parts of the batch, g being the mean gradient of a part and w
    its fraction of the batch's `samples`; `weight` is the sum of w. `whole` is the squared norm of the mean
    gradient of the whole batch.
    """

    parts: float
    weight: float
    count: float
    whole: float
    samples: float


@dataclass(frozen=True)
class GradientMoments:
    """Unbiased estimates from one step; as differences, they may be negative.

    `variance` is the trace of the covariance of one sample's gradient, `squared_norm` that of the true
    gradient.
    """

    variance: float
    squared_norm: float


def estimate(norms: GradientNorms) -> GradientMoments | None:
    """The estimates of one step; None if its only part is the whole batch, or a norm is not finite."""
    spread = norms.count - norms.weight
    if spread < 1e-9 or not math.isfinite(norms.parts) or not math.isfinite(norms.whole):
        return None
    variance = (norms.parts - norms.weight * norms.whole) * norms.samples / spread
    return GradientMoments(variance, norms.whole - variance / norms.samples)


class GradientAverages:
    """Moving averages of the moments of a run's gradients, and the resulting noise scale.

    Numerator and denominator are averaged separately: the mean of their quotients would be biased, and
    unbounded for |G|² close to zero.
    """

    def __init__(self, decay: float = DECAY) -> None:
        self._variance = MovingAverage(decay)
        self._squared_norm = MovingAverage(decay)
        self._whole = MovingAverage(decay)
        self.steps = 0

    def update(self, norms: GradientNorms) -> None:
        moments = estimate(norms)
        if moments is not None:
            self.add(moments, norms.whole)

    def add(self, moments: GradientMoments, whole: float) -> None:
        """Add the moments of one step, whose gradient has the squared norm `whole`."""
        if math.isfinite(moments.variance) and math.isfinite(moments.squared_norm) and math.isfinite(whole):
            self._variance.update(moments.variance)
            self._squared_norm.update(moments.squared_norm)
            self._whole.update(whole)
            self.steps += 1

    @property
    def variance(self) -> float | None:
        """The trace of the covariance of one sample's gradient; None before the first step.

        Negative if it cannot be distinguished from zero yet.
        """
        return self._variance.value

    @property
    def squared_norm(self) -> float | None:
        """The squared norm of the true gradient; negative if noise hides it."""
        return self._squared_norm.value

    @property
    def noise_scale(self) -> float | None:
        """In samples; a lower bound if `note` says so, None before the first step."""
        return self._noise_scale()[0]

    @property
    def note(self) -> str | None:
        """Why `noise_scale` is not the quotient of the averages, as text; None if it is."""
        return self._noise_scale()[1]

    def _noise_scale(self) -> tuple[float | None, str | None]:
        variance, squared_norm, whole = self._variance.value, self._squared_norm.value, self._whole.value
        if variance is None or squared_norm is None or whole is None:
            return None, None
        if variance <= 0 or whole <= 0:
            return 0.0, f"no noise seen: the variance is estimated as {variance:.3g}"
        least = LEAST_SIGNAL * whole
        if squared_norm >= least:
            return variance / squared_norm, None
        return variance / least, (
            f"at least: the squared norm of the gradient is estimated as {squared_norm:.3g}, less than "
            f"{LEAST_SIGNAL:.0%} of the batch's {whole:.3g}, and cannot be distinguished from noise"
        )

    def state(self) -> list[float]:
        """The state for `load`, as plain numbers."""
        averages = (self._variance, self._squared_norm, self._whole)
        return [float(self.steps), *(number for each in averages for number in each.state())]

    def load(self, state: Sequence[float]) -> None:
        """Load a state; ignored if its length differs, as from a run without measurements."""
        if len(state) != len(self.state()):
            return
        self.steps = int(state[0])
        for i, each in enumerate((self._variance, self._squared_norm, self._whole)):
            each.load((state[1 + 2 * i], state[2 + 2 * i]))
