"""Dense layers of all trials under autocast on a GPU; gradients have the weights' layout and type at once.

As autograd would have it, the gradient of a weight is a transposed product of 16 bits, then a cast, then a
copy into the layout of the weight for the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.kernels import can_run_on

# From here on, a width that is no multiple of 8 is padded: products of others run at a third of their speed.
_LEAST_PADDED, _ROUND = 4096, 8


class _CastDense(torch.autograd.Function):
    """x w^T + b for each trial, with gradients in the precision of x, w and b.

    It is computed from casts of x and w, which are arguments, too: they alone are kept for backward, and
    second derivatives pass through them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, half: Tensor, own: Tensor
    ) -> Tensor:
        ctx.kinds = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.width = weight.shape[1]
        ctx.save_for_backward(half, own)
        if bias is None:
            return _without_padding(torch.bmm(half, own.mT), ctx.width)
        y = _fill_rows(_padded(bias, half.dtype), half.shape[1])
        return _without_padding(y.baddbmm_(half, own.mT), ctx.width)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        half, own = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.kinds
        db = dy.sum(1, dtype=of_bias) if ctx.needs_input_grad[2] else None
        dy = _with_padding(dy, own.shape[1])
        dx = _product(dy, own, of_x) if ctx.needs_input_grad[0] else None
        dw = _product(dy.mT, half, of_weight)[:, : ctx.width] if ctx.needs_input_grad[1] else None
        return dx, dw, db, None, None


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, kind: torch.dtype) -> Tensor:
        ctx.width, ctx.kind = own.shape[1], own.dtype
        padded = own.new_empty((len(own), ctx.width + -ctx.width % _ROUND, *own.shape[2:]), dtype=kind)
        # One trial after another, since torch copies what is not contiguous one number at a time.
        torch._foreach_copy_([part[: ctx.width] for part in padded], list(own))
        padded[:, ctx.width :] = 0
        return padded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[:, : ctx.width].to(ctx.kind), None


def _padded(own: Tensor, kind: torch.dtype) -> Tensor:
    """A weight (trials, width, channels) or a bias (trials, width) in another precision, zeros after it."""
    width = own.shape[1]
    if width < _LEAST_PADDED or width % _ROUND == 0:
        return own.to(kind)
    padded: Tensor = _Padded.apply(own, kind)  # type: ignore[no-untyped-call]
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


def _fill_rows(bias: Tensor, rows: int) -> Tensor:
    """A row for each trial, `rows` times; torch's copy writes one number at a time."""
    if not can_run_on(bias):
        return bias.unsqueeze(1).repeat(1, rows, 1)
    from plait.fusion.kernels.rows import repeated  # needs Triton

    return repeated(bias, rows)


def gpu_dense(x_tbc: Tensor, weight_toc: Tensor, bias_to: Tensor | None) -> Tensor | None:
    """x W^T + b for each trial; None if this has no advantage."""
    if not torch.is_autocast_enabled("cuda") or not torch.is_grad_enabled():
        return None
    kinds = {tensor.dtype for tensor in (x_tbc, weight_toc, bias_to) if tensor is not None}
    if torch.float64 in kinds:  # autocast does not cast it
        return None
    return cast_dense(x_tbc, weight_toc, bias_to, torch.get_autocast_dtype("cuda"))


def cast_dense(x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype) -> Tensor:
    """x W^T + b for each trial, computed in the precision `kind`."""
    y: Tensor = _CastDense.apply(x, weight, bias, x.to(kind), _padded(weight, kind))  # type: ignore[no-untyped-call]
    return y
