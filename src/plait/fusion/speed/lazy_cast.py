"""Casts of large tensors to float32 that are computed lazily, since a loss can read the 16 bits itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.fusion.dispatch import alias_links
from plait.fusion.errors import FusionError
from plait.fusion.kernels import can_run_on

# Below, a cast costs less than to think about it.
_LEAST_ELEMENTS = 1 << 20
View = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class _Cast:
    """A cast of `source`, trials first, to float32; `made` is its result, once something needs it."""

    source: Tensor
    mark: tuple[int, int]
    grad: bool
    made: Tensor | None = None

    def current(self) -> Tensor:
        """The result if there is one, else the tensor to be cast, unchanged since then."""
        if self.made is not None:
            return self.made
        # A write through `.data` does not change the version.
        if _mark(self.source) != self.mark or self in alias_links.readers_of_written:
            raise FusionError(
                "a tensor was written in place after it was cast by float(), before that was used; write the "
                "in-place operation out of place"
            )
        return self.source

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
        return PendingCast(self.cast, lambda tensor: view(inner(tensor)), _like(seen), grad)


def pending_cast(source: Tensor) -> PendingCast | None:
    """The cast of a tensor; None if it is to be computed at once."""
    half = source.dtype in (torch.bfloat16, torch.float16)
    if not half or source.numel() < _LEAST_ELEMENTS or source.is_inference() or not can_run_on(source):
        return None
    grad = torch.is_grad_enabled()
    cast = _Cast(source, _mark(source), grad)
    alias_links.note_reader(source, cast)
    return PendingCast(cast, lambda tensor: tensor, _like(source), grad)


def _like(tensor: Tensor) -> Tensor:
    return tensor.new_empty((), dtype=torch.float32).expand(tensor.shape)


def _mark(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to, or gets other memory."""
    return tensor._version, tensor.data_ptr()
