"""Batch norms that wait for what follows: a ReLU, leaky or not, or a maximum joins them in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.fusion.errors import FusionError


@dataclass(frozen=True)
class PendingNorm:
    """A batch norm whose statistics are known and whose outcome nobody has asked for yet.

    `norm(slope)` computes it, `largest(slope)` its maximum over the last axis and where that is; the slope is
    what a ReLU multiplies negative values by, 1 where none follows. Both run under the gradient mode and on
    the values that the model had when it called the norm. `like` has the outcome's shape, trials first.
    """

    norm: Callable[[float], Tensor]
    largest: Callable[[float], tuple[Tensor, Tensor]] | None
    source: Tensor
    like: Tensor
    version: int
    grad: bool
    slope: float = 1.0

    def with_slope(self, slope: float) -> PendingNorm:
        return replace(self, slope=slope)

    def outcome(self) -> Tensor:
        with self._as_called():
            return self.norm(self.slope)

    def maximum(self) -> tuple[Tensor, Tensor]:
        assert self.largest is not None
        with self._as_called():
            return self.largest(self.slope)

    def _as_called(self) -> torch.set_grad_enabled:
        if self.source._version != self.version:
            raise FusionError(
                "a batch norm's input was written in place before the norm's outcome was used; write the "
                "in-place operation out of place"
            )
        return torch.set_grad_enabled(self.grad)
