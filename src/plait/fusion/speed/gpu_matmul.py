"""Dense layers of all trials under autocast on a GPU; gradients have the weights' layout and type at once.

As autograd would have it, the gradient of a weight is a transposed product of 16 bits, then a cast, then a
copy into the layout of the weight for the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.fusion.kernels import can_run_on

# From here on, a width that is no multiple of 8 is padded: products of others run at a third of their speed.
_LEAST_PADDED, _ROUND = 4096, 8


class _CastDense(torch.autograd.Function):
    """x w^T + b for each trial in the precision `kind`, with gradients in those of x, w and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype) -> Tensor:
        ctx.kinds = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.width = weight.shape[1]
        x, weight = x.to(kind), _padded(weight, kind)
        ctx.save_for_backward(x, weight)
        if bias is None:
            return _without_padding(torch.bmm(x, weight.mT), ctx.width)
        y = _fill_rows(_padded(bias, kind), x.shape[1])
        return _without_padding(y.baddbmm_(x, weight.mT), ctx.width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.kinds
        db = dy.sum(1, dtype=of_bias) if ctx.needs_input_grad[2] else None
        dy = _with_padding(dy, weight.shape[1])
        dx = _product(dy, weight, of_x) if ctx.needs_input_grad[0] else None
        dw = _product(dy.mT, x, of_weight)[:, : ctx.width] if ctx.needs_input_grad[1] else None
        return dx, dw, db, None


def _padded(own: Tensor, kind: torch.dtype) -> Tensor:
    """A weight (trials, width, channels) or a bias (trials, width) in another precision, zeros after it."""
    width = own.shape[1]
    if width < _LEAST_PADDED or width % _ROUND == 0:
        return own.to(kind)
    padded = own.new_empty((len(own), width + -width % _ROUND, *own.shape[2:]), dtype=kind)
    # One trial after another, since torch copies what is not contiguous one number at a time.
    torch._foreach_copy_([part[:width] for part in padded], list(own))
    padded[:, width:] = 0
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
    if dy.stride() == strides and dy.storage_offset() == 0 and whole:
        return dy.as_strided((trials, rows, width), strides)
    return torch.nn.functional.pad(dy, (0, width - own))


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    if kind == torch.float32 and a.is_cuda:
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
    kind = torch.get_autocast_dtype("cuda")
    y: Tensor = _CastDense.apply(x_tbc, weight_toc, bias_to, kind)  # type: ignore[no-untyped-call]
    return y
