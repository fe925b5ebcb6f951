"""Dense layers of all trials: the way that is fastest on their device.

On a CPU the speed of a product depends on which operand is transposed: OpenBLAS multiplies small matrices
several times faster if none is; copying the smaller operand first is cheap compared with that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.plain_function import PlainFunction
from plait.fusion.speed.autotune import choose
from plait.fusion.speed.gpu_matmul import cast_dense, cast_kind
from plait.pipeline.split_backward import DeferWeights, accumulate, deferring


class _Dense(PlainFunction):
    """x w^T for each trial: (trials, batch, channels) with (trials, out, channels), no operand transposed.

    `lead` says which operand is copied into its transpose: the weights or the inputs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lead: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        if lead == "weights":
            return torch.bmm(x.contiguous(), weight.mT.contiguous())
        return torch.bmm(weight, x.mT.contiguous()).mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx = torch.bmm(dy.contiguous(), weight) if ctx.needs_input_grad[0] else None
        dw = torch.bmm(dy.mT.contiguous(), x.contiguous()) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _DeferredDense(PlainFunction):
    """x w^T + b for each trial, whose backward leaves the gradients of w and b for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, defer: DeferWeights) -> Tensor:
        ctx.leaves, ctx.defer = (weight, bias), defer
        ctx.save_for_backward(x, weight)
        return _straight(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        leaf, bias = ctx.leaves

        def job() -> None:
            accumulate(leaf, torch.bmm(dy.mT, x))
            accumulate(bias, None if bias is None else dy.sum(1))

        ctx.defer.leave(job, dy)
        return torch.bmm(dy, weight) if ctx.needs_input_grad[0] else None, None, None, None


def _straight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _leading(lead: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = _Dense.apply(x, weight, lead)
    return product if bias is None else product + bias.unsqueeze(1)


_WAYS = {
    "straight": _straight,
    "weights copied": lambda x, weight, bias: _leading("weights", x, weight, bias),
    "inputs copied": lambda x, weight, bias: _leading("inputs", x, weight, bias),
}


def dense(x_tbc: Tensor, weight_toc: Tensor, bias_to: Tensor | None) -> Tensor:
    """x W^T + b for each trial."""
    if x_tbc.dtype == weight_toc.dtype and (defer := deferring(weight_toc, bias_to)) is not None:
        product: Tensor = _DeferredDense.apply(x_tbc, weight_toc, bias_to, defer)
        return product
    if x_tbc.is_cuda and (kind := cast_kind(x_tbc, weight_toc, bias_to)) is not None:
        return cast_dense(x_tbc, weight_toc, bias_to, kind)
    plain = x_tbc.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if not plain or x_tbc.dtype != weight_toc.dtype:
        return _straight(x_tbc, weight_toc, bias_to)
    return choose("dense", _WAYS, x_tbc, weight_toc, bias_to)
