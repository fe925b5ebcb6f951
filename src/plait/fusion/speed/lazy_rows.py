"""What follows a dense layer under autocast on a GPU, computed lazily: bias, activation, residual sum, norm.

As single operations they pass over memory a dozen times. Here the bias is added with the activation or the
residual sum that follows, that sum is computed with the norm that follows it, and a norm writes the precision
in which the next dense layer reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.fusion.kernels import can_run_on
from plait.fusion.speed.gpu_matmul import cast_dense, cast_kind
from plait.fusion.speed.lazy_reads import Watched, like_of
from plait.pipeline.split_backward import deferring

# Below, passes over memory cost less than to think about them.
_LEAST_ELEMENTS = 1 << 18


def rows_of(tensor: Tensor) -> Tensor:
    """(trials, rows, channels), a view."""
    return tensor if tensor.dim() == 3 else tensor.view(tensor.shape[0], -1, tensor.shape[-1])


@dataclass(eq=False)
class PendingDense:
    """A dense layer without its bias: `product` is (trials, rows, channels), of a tensor like `like`."""

    product: Tensor
    bias: Watched
    like: Tensor
    # Whether something else was computed from the product, or will be.
    is_read: bool = False

    def outcome(self) -> Tensor:
        from plait.fusion.kernels.activation import biased  # needs Triton

        with torch.enable_grad():
            product = self.product.clone() if self.is_read else self.product
            outcome: Tensor = biased(product, self.bias.unwritten()).view(self.like.shape)
            return outcome

    def activated(self, kind: str) -> Tensor:
        """The activation of the layer's output."""
        from plait.fusion.kernels.activation import activated  # needs Triton

        self.is_read = True
        with torch.enable_grad():
            outcome: Tensor = activated(self.product, self.bias.unwritten(), kind).view(self.like.shape)
            return outcome


def pending_dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> PendingDense | None:
    """The dense layer of each trial; None if it is to be computed at once."""
    if bias is None or not can_run_on(x):
        return None
    kind = cast_kind(x, weight, bias)
    shape = torch.Size((*x.shape[:-1], weight.shape[1]))
    if kind is None or x.dim() < 3 or shape.numel() < _LEAST_ELEMENTS or deferring(weight, bias) is not None:
        return None
    flat = x if x.dim() == 3 else x.reshape(x.shape[0], -1, x.shape[-1])
    like = like_of(shape, kind, x.device)
    return PendingDense(cast_dense(flat, weight, None, kind), Watched(bias, "read by a layer"), like)


@dataclass(eq=False)
class PendingSum:
    """The sum of a tensor and a dense layer's output."""

    x: Watched
    dense: PendingDense
    like: Tensor
    norms: list[PendingRowNorm] = field(default_factory=list)

    def outcome(self) -> Tensor:
        return self.with_norm(None, None, None)[0]

    def with_norm(self, norm: Any, weight: Tensor | None, bias: Tensor | None) -> list[Tensor]:
        """The sum, and its norms."""
        from plait.fusion.kernels.sum_norm import sum_norm  # needs Triton

        with torch.enable_grad():
            rows = rows_of(self.x.unwritten())
            made = sum_norm(rows, self.dense.product, self.dense.bias.unwritten(), norm, weight, bias)
            shaped = [part.view(self.like.shape) for part in made]
        for each in self.norms:
            each.watched = Watched(shaped[0], "normalized")
        return shaped


def pending_sum(x: Any, y: Any) -> PendingSum | None:
    """The sum of two trial tensors; None if neither is a pending dense layer that can be added later."""
    dense, other = (x, y) if isinstance(x.pending, PendingDense) else (y, x)
    pending = dense.pending
    if not isinstance(pending, PendingDense) or isinstance(other.pending, PendingDense):
        return None
    if x.shape != y.shape or not torch.is_grad_enabled() or not pending.product.is_contiguous():
        return None
    inner = other.stacked
    if inner.dtype not in (torch.float32, pending.product.dtype) or not inner.is_contiguous():
        return None
    pending.is_read = dense.is_passed_by = True
    like = like_of(pending.like.shape, inner.dtype, inner.device)
    return PendingSum(Watched(inner, "added to another"), pending, like)


@dataclass(eq=False)
class _Readers:
    """Who reads the norm with a weight, known after its first forward: dense layers alone, or others too."""

    streams: Any
    is_first: bool = True
    others: bool = False


_readers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(eq=False)
class PendingRowNorm:
    """A layer or RMS norm of the rows of a trial tensor, in float32 or as a dense layer reads it."""

    source: Any
    weight: Watched
    bias: Watched | None
    eps: float
    centred: bool
    half_kind: torch.dtype
    readers: _Readers
    like: Tensor
    # None while the source is a sum that is not computed yet.
    watched: Watched | None = None
    made: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def outcome(self) -> Tensor:
        self.readers.others |= self.readers.is_first
        return self._in(torch.float32)

    def half(self) -> Tensor:
        """In the precision of products under autocast."""
        return self._in(self.half_kind)

    def _in(self, kind: torch.dtype) -> Tensor:
        if kind not in self.made:
            both = not self.made and kind != torch.float32 and (self.readers.is_first or self.readers.others)
            self._compute((torch.float32, kind) if both else (kind,))
        return self.made[kind]

    def _compute(self, kinds: tuple[torch.dtype, ...]) -> None:
        from plait.fusion.kernels.sum_norm import Norm, sum_norm  # needs Triton

        norm, source = Norm(self.eps, self.centred, kinds), self.source
        weight, bias = self.weight.unwritten(), None if self.bias is None else self.bias.unwritten()
        if isinstance(source.pending, PendingSum):
            total, *norms = source.pending.with_norm(norm, weight, bias)
            source.resolve(total)
            source.is_passed_by = True
        else:
            assert self.watched is not None
            with torch.enable_grad():
                rows = rows_of(self.watched.unwritten())
                norms = [*sum_norm(rows, None, None, norm, weight, bias)]
        with torch.enable_grad():
            self.made |= {kind: made.view(self.like.shape) for kind, made in zip(kinds, norms)}


def pending_row_norm(
    x: Any, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> PendingRowNorm | None:
    """The norm of a trial tensor in float32, whose weights are in float32; None if to be computed at once."""
    kind = cast_kind(weight)
    pending = x.pending if isinstance(x.pending, PendingSum) else None
    if weight is None or kind is None or x.dtype != torch.float32:
        return None
    if x.shape.numel() * x.trials.count < _LEAST_ELEMENTS:
        return None
    if pending is None and not x.stacked.is_contiguous():
        return None
    streams = x.trials.streams
    readers = _readers.get(weight)
    if readers is None:
        readers = _readers[weight] = _Readers(streams)
    elif readers.streams is not streams and not streams.is_repeated:
        readers.is_first = False
    own = Watched(weight, "read by a norm"), None if bias is None else Watched(bias, "read by a norm")
    if pending is not None:
        made = PendingRowNorm(x, *own, eps, centred, kind, readers, pending.like)
        pending.norms.append(made)
        return made
    inner = x.stacked
    like = like_of(inner.shape, inner.dtype, inner.device)
    return PendingRowNorm(x, *own, eps, centred, kind, readers, like, Watched(inner, "normalized"))


def read_by_dense(x: Any) -> Tensor:
    """The rows of a trial tensor as a dense layer reads them; a pending norm in the precision of products."""
    pending = x.pending
    if isinstance(pending, PendingRowNorm) and cast_kind() == pending.half_kind:
        x.is_passed_by = True
        return pending.half()
    rows: Tensor = x.stacked
    return rows
