"""Batch norms that wait for what follows: a ReLU or a maximum is computed with them in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.fusion.errors import FusionError


@dataclass(frozen=True)
class PendingNorm:
    """A batch norm whose statistics are known and whose outcome nobody has asked for yet.

    `norm(relu)` computes it, `largest(relu)` its maximum over the last axis and where that is. Both run under
    the gradient mode and on the values that the model had when it called the norm. `like` has the outcome's
    shape, trials first.
    """

    norm: Callable[[bool], Tensor]
    largest: Callable[[bool], tuple[Tensor, Tensor]] | None
    source: Tensor
    like: Tensor
    version: int
    grad: bool
    relu: bool = False

    def with_relu(self) -> PendingNorm:
        return replace(self, relu=True)

    def outcome(self) -> Tensor:
        with self._as_called():
            return self.norm(self.relu)

    def maximum(self) -> tuple[Tensor, Tensor]:
        assert self.largest is not None
        with self._as_called():
            return self.largest(self.relu)

    def _as_called(self) -> torch.set_grad_enabled:
        if self.source._version != self.version:
            raise FusionError(
                "a batch norm's input was written in place before the norm's outcome was used; write the "
                "in-place operation out of place"
            )
        return torch.set_grad_enabled(self.grad)
