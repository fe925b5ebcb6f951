"""Dense layers of all trials on a GPU: products that write what is needed next, in its layout and type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Products whose rows begin at multiples of so many elements of 16 bits use the fastest kernels.
_ROUND = 8


class _Dense(torch.autograd.Function):
    """x w^T + b for each trial in the precision `kind`, with gradients in those of x, w and b.

    The gradient of w is computed in the layout of w, as optimizers want it, and in float32 the products of 16
    bits are written as such.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype) -> Tensor:
        ctx.kinds = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x, weight = x.to(kind), weight.to(kind)
        ctx.save_for_backward(x, weight)
        y = _rounded(x, weight)
        if bias is None:
            return torch.bmm(x, weight.mT, out=y)
        return torch.baddbmm(bias.to(kind).unsqueeze(1), x, weight.mT, out=y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.kinds
        dx = _product(dy, weight, of_x) if ctx.needs_input_grad[0] else None
        dw = _product(dy.mT, x, of_weight) if ctx.needs_input_grad[1] else None
        db = dy.sum(1, dtype=of_bias) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def _rounded(x: Tensor, weight: Tensor) -> Tensor:
    """Memory for a product, each row of which begins at a round address."""
    outputs = weight.shape[1]
    padded = outputs + -outputs % _ROUND
    return x.new_empty(*x.shape[:2], padded)[:, :, :outputs]


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    if a.dtype == kind:
        return torch.bmm(a, b)
    if kind == torch.float32 and not torch.is_grad_enabled():  # it has no derivative of its own
        wide: Tensor = torch.bmm(a, b, out_dtype=kind)
        return wide
    return torch.bmm(a, b).to(kind)


def gpu_dense(x_tbc: Tensor, weight_toc: Tensor, bias_to: Tensor | None) -> Tensor | None:
    """x W^T + b for each trial; None if this has no advantage."""
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_tbc.dtype
    kinds = {tensor.dtype for tensor in (x_tbc, weight_toc, bias_to) if tensor is not None}
    # Autocast does not cast float64; without it torch says what is wrong with unlike types.
    usual = torch.float64 not in kinds if torch.is_autocast_enabled("cuda") else kinds == {kind}
    if kind not in (torch.bfloat16, torch.float16) or not usual or not torch.is_grad_enabled():
        return None
    y: Tensor = _Dense.apply(x_tbc, weight_toc, bias_to, kind)  # type: ignore[no-untyped-call]
    return y
