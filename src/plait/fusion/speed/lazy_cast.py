"""Casts of large tensors to float32 that are computed lazily, since a loss can read the 16 bits itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.fusion.kernels import HALF, can_run_on
from plait.fusion.speed.lazy_reads import Watched, like_of

# Below, a cast costs less than to think about it.
_LEAST_ELEMENTS = 1 << 20
View = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class _Cast:
    """A cast of `source`, trials first, to float32; `made` is its result, once something needs it."""

    source: Watched
    grad: bool
    made: Tensor | None = None

    def current(self) -> Tensor:
        """The result if there is one, else the tensor to be cast, unchanged since then."""
        return self.source.unwritten() if self.made is None else self.made

    def outcome(self) -> Tensor:
        if self.made is None:
            with torch.set_grad_enabled(self.grad):
                self.made = self.current().float()
        return self.made


@dataclass(frozen=True)
class PendingCast:
    """A view of a cast that may not be computed yet; all views of one are views of one result.

    `like` has the shape and dtype of it, and no memory; `grad` says whether gradients pass.
    """

    cast: _Cast
    view: View
    like: Tensor
    grad: bool

    def outcome(self) -> Tensor:
        return self._seen(self.cast.outcome())

    def uncast(self) -> Tensor:
        """The values, in 16 bits unless the cast was computed for something else."""
        return self._seen(self.cast.current())

    def _seen(self, tensor: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.grad):
            seen = self.view(tensor)
        return seen if self.grad else seen.detach()

    def seen_as(self, view: View) -> PendingCast | None:
        """The cast as seen through another view; None if that would be a copy."""
        inner = self.view
        with torch.no_grad():
            seen = view(inner(self.cast.current()))
        if seen.untyped_storage()._cdata != self.cast.current().untyped_storage()._cdata:
            return None
        grad = self.grad and torch.is_grad_enabled()
        like = like_of(seen.shape, torch.float32, seen.device)
        return PendingCast(self.cast, lambda tensor: view(inner(tensor)), like, grad)


def pending_cast(source: Tensor) -> PendingCast | None:
    """The cast of a tensor; None if it is to be computed at once."""
    half = source.dtype in HALF
    if not half or source.numel() < _LEAST_ELEMENTS or source.is_inference() or not can_run_on(source):
        return None
    grad = torch.is_grad_enabled()
    cast = _Cast(Watched(source, "cast by float()"), grad)
    like = like_of(source.shape, torch.float32, source.device)
    return PendingCast(cast, lambda tensor: tensor, like, grad)
