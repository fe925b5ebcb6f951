"""Dense layers of all trials under autocast on a GPU; gradients have the weights' layout and type at once.

As autograd would have it, the gradient of a weight is a transposed product of 16 bits, then a cast, then a
copy into the layout of the weight for the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _CastDense(torch.autograd.Function):
    """x w^T + b for each trial in the precision `kind`, with gradients in those of x, w and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype) -> Tensor:
        ctx.kinds = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x, weight = x.to(kind), weight.to(kind)
        ctx.save_for_backward(x, weight)
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.to(kind).unsqueeze(1), x, weight.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.kinds
        dx = _product(dy, weight, of_x) if ctx.needs_input_grad[0] else None
        dw = _product(dy.mT, x, of_weight) if ctx.needs_input_grad[1] else None
        db = dy.sum(1, dtype=of_bias) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    if kind == torch.float32 and a.is_cuda:
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
    kind = torch.get_autocast_dtype("cuda")
    y: Tensor = _CastDense.apply(x_tbc, weight_toc, bias_to, kind)  # type: ignore[no-untyped-call]
    return y
