"""Dense layers of all trials under autocast on a GPU; gradients have the weights' layout and type at once.

As autograd would have it, the gradient of a weight is a transposed product of 16 bits, then a cast, then a
copy into the layout of the weight for the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.kernels import can_run_on
from plait.fusion.plain_function import PlainFunction
from plait.fusion.speed.tied_rows import table_of

# From here on, a width that is no multiple of 8 is padded: products of others run at a third of their speed.
_LEAST_PADDED, _ROUND = 4096, 8


class _CastDense(PlainFunction):
    """x w^T + b for each trial, with gradients in the precision of x, w and b.

    It is computed from casts of x and w, which are arguments, too: they alone are kept for backward, and
    second derivatives pass through them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, half: Tensor, own: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.kinds = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.width, ctx.table = weight.shape[1], table_of(weight)
        ctx.save_for_backward(half, own)
        y = _without_padding(torch.bmm(half, own.mT), ctx.width)
        if bias is not None:
            _add_bias(y, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        half, own = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.kinds
        db = dy.sum(1, dtype=of_bias) if ctx.needs_input_grad[4] else None
        dy = _with_padding(dy, own.shape[1])
        dx = _product(dy, own, of_x) if ctx.needs_input_grad[0] else None
        dw = _product(dy.mT, half, of_weight)[:, : ctx.width] if ctx.needs_input_grad[1] else None
        if ctx.table is not None and dw is not None:
            ctx.table.fresh = dw.data_ptr()
        return dx, dw, None, None, db


def _add_bias(y: Tensor, bias: Tensor) -> None:
    if not can_run_on(y):
        y += bias.to(y.dtype).unsqueeze(1)
        return
    from plait.fusion.kernels.activation import add_bias  # needs Triton

    add_bias(y, bias)


class _Padded(PlainFunction):
    @staticmethod
    def forward(ctx: Any, own: Tensor, kind: torch.dtype) -> Tensor:
        # The first derivatives of a dense layer do not pass here.
        ctx.set_materialize_grads(False)
        ctx.width, ctx.kind = own.shape[1], own.dtype
        padded = own.new_empty((len(own), ctx.width + -ctx.width % _ROUND, *own.shape[2:]), dtype=kind)
        # One trial after another, since torch copies what is not contiguous one number at a time.
        torch._foreach_copy_([part[: ctx.width] for part in padded], list(own))
        padded[:, ctx.width :] = 0
        return padded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else gradient[:, : ctx.width].to(ctx.kind), None


def _padded(weight: Tensor, kind: torch.dtype) -> Tensor:
    """A weight (trials, width, channels) in another precision, zeros after it."""
    width = weight.shape[1]
    if width < _LEAST_PADDED or width % _ROUND == 0:
        return weight.to(kind)
    padded: Tensor = _Padded.apply(weight, kind)
    return padded


def _without_padding(y: Tensor, width: int) -> Tensor:
    """The first columns of y, which is no view, so that it can be written in place."""
    if y.shape[-1] == width:
        return y
    return y.new_empty(0).set_(y.untyped_storage(), 0, (*y.shape[:2], width), y.stride())


def _with_padding(dy: Tensor, width: int) -> Tensor:
    """dy with columns that are multiplied by zeros: those after its rows where there are such, as its loss
    makes them, else new ones.
    """
    trials, rows, own = dy.shape
    if own == width:
        return dy
    strides = (rows * width, width, 1)
    whole = dy.untyped_storage().nbytes() == trials * rows * width * dy.element_size()
    if dy.stride() == strides and dy.storage_offset() == 0 and whole and not torch.is_grad_enabled():
        return dy.as_strided((trials, rows, width), strides)
    return torch.nn.functional.pad(dy, (0, width - own))


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    # A product with a wider result has no derivative.
    if kind == torch.float32 and a.is_cuda and not torch.is_grad_enabled():
        wide: Tensor = torch.bmm(a, b, out_dtype=kind)
        return wide
    return torch.bmm(a, b).to(kind)


def cast_kind(*operands: Tensor | None) -> torch.dtype | None:
    """The precision of a dense layer that trains under autocast; None for others."""
    if not torch.is_autocast_enabled("cuda") or not torch.is_grad_enabled():
        return None
    is_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in operands)
    return None if is_double else torch.get_autocast_dtype("cuda")  # which does not cast doubles


def cast_dense(x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype) -> Tensor:
    """x W^T + b for each trial, computed in the precision `kind`."""
    y: Tensor = _CastDense.apply(x, weight, x.to(kind), _padded(weight, kind), bias)
    return y
