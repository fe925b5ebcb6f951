"""Batch norms and convolutions that are computed lazily, with an activation or a maximum after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.fusion.kernels import Slope
from plait.fusion.speed.lazy_reads import Watched


@dataclass(frozen=True)
class PendingActivation:
    """An operation on `sources` whose output is not computed yet.

    `compute(slope)` computes it, `largest(slope)` its maximum over the last axis and the index of that; the
    slope is the ReLU's factor for negative values, 1 without a ReLU, or one of the smooth activations `names`
    that can be computed, too. Both run in the gradient mode and on the values at the time of the call. `like`
    has the shape of the output, trials first.
    """

    compute: Callable[[Slope], Tensor]
    largest: Callable[[float], tuple[Tensor, Tensor]] | None
    sources: Sequence[Watched]
    like: Tensor
    grad: bool
    names: frozenset[str] = frozenset()
    slope: Slope = 1.0

    def with_slope(self, slope: Slope) -> PendingActivation | None:
        """With an activation; None if it has one already, or cannot be computed with this one.

        With a negative slope the maximum of the norm would not be the maximum of the activation.
        """
        fits = slope in self.names if isinstance(slope, str) else slope >= 0.0
        if self.slope != 1.0 or not fits:
            return None
        largest = None if isinstance(slope, str) else self.largest
        return PendingActivation(self.compute, largest, self.sources, self.like, self.grad, slope=slope)

    def outcome(self) -> Tensor:
        with self._as_called():
            return self.compute(self.slope)

    def maximum(self) -> tuple[Tensor, Tensor]:
        assert self.largest is not None
        assert not isinstance(self.slope, str)
        with self._as_called():
            return self.largest(self.slope)

    def _as_called(self) -> torch.set_grad_enabled:
        for source in self.sources:
            source.unwritten()
        return torch.set_grad_enabled(self.grad)
