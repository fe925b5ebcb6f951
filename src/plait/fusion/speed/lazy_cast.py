"""Casts of large tensors to float32 that are computed lazily, since a loss can read the 16 bits itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.fusion.errors import FusionError
from plait.fusion.kernels import can_run_on

# Below, a cast costs less than to think about it.
_LEAST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class PendingCast:
    """A cast of `source`, trials first, to float32; `like` has the shape and dtype of that, and no memory."""

    source: Tensor
    like: Tensor
    version: int
    grad: bool

    def outcome(self) -> Tensor:
        with torch.set_grad_enabled(self.grad):
            return self.checked().float()

    def checked(self) -> Tensor:
        """The tensor to be cast, unchanged since then."""
        if self.source._version != self.version:
            raise FusionError(
                "a tensor was written in place after it was cast by float(), before that was used; write the "
                "in-place operation out of place"
            )
        return self.source

    def seen_as(self, view: Callable[[Tensor], Tensor]) -> PendingCast:
        """The cast of a view of the tensor."""
        with torch.set_grad_enabled(self.grad):
            return _pending(view(self.checked()), self.grad)


def pending_cast(source: Tensor) -> PendingCast | None:
    """The cast of a tensor; None if it is to be computed at once."""
    half = source.dtype in (torch.bfloat16, torch.float16)
    waits = half and source.numel() >= _LEAST_ELEMENTS and can_run_on(source) and not source.is_inference()
    return _pending(source, torch.is_grad_enabled()) if waits else None


def _pending(source: Tensor, grad: bool) -> PendingCast:
    like = source.new_empty((), dtype=torch.float32).expand(source.shape)
    return PendingCast(source, like, source._version, grad)
