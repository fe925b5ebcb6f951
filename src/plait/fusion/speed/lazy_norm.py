"""Batch norms that are computed lazily, so that a following (leaky) ReLU or maximum is fused with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.fusion.errors import FusionError


@dataclass(frozen=True)
class PendingNorm:
    """A batch norm whose statistics are computed and whose output is not.

    `norm(slope)` computes it, `largest(slope)` its maximum over the last axis and the index of that; the
    slope is the ReLU's factor for negative values, 1 without a ReLU. Both run in the gradient mode and on the
    values at the time of the call. `like` has the shape of the output, trials first.
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
                "a batch norm's input was written in place before the norm's output was used; write the "
                "in-place operation out of place"
            )
        return torch.set_grad_enabled(self.grad)
