"""Dense layers of all trials under autocast on a GPU; gradients have the weights' layout and type at once.

As autograd would have it, the gradient of a weight is a transposed product of 16 bits, then a cast, then a
copy into the layout of the weight for the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
        ctx.save_for_backward(half, own)
        if bias is None:
            return torch.bmm(half, own.mT)
        return torch.baddbmm(bias.to(half.dtype).unsqueeze(1), half, own.mT)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        half, own = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.kinds
        dx = _product(dy, own, of_x) if ctx.needs_input_grad[0] else None
        dw = _product(dy.mT, half, of_weight) if ctx.needs_input_grad[1] else None
        db = dy.sum(1, dtype=of_bias) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    # A product with a wider result has no derivative.
    if kind == torch.float32 and a.is_cuda and not torch.is_grad_enabled():
        wide: Tensor = torch.bmm(a, b, out_dtype=kind)
        return wide
    return torch.bmm(a, b).to(kind)


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
    y: Tensor = _CastDense.apply(x, weight, bias, x.to(kind), weight.to(kind))  # type: ignore[no-untyped-call]
    return y
