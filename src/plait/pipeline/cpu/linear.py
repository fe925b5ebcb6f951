"""Linear layers on a CPU with a faster backward, with the same result.

The weight gradient of a microbatch is accumulated by the matrix product itself (`addmm_`), where autograd
computes it first and adds it then. The bias gradient is a product with ones, which takes a third of the time
of a sum over rows.

Weights may be stored transposed, with the output axis innermost: `transpose_weights`. OpenBLAS, which torch
uses on ARM, packs a transposed operand much slower than a plain one, and a linear layer's forward multiplies
by the transposed weights, its backward by the plain ones. With 1024 x 1024 weights and 32 rows, forward and
backward take 2.96 and 2.18 ms with plain weights, 2.27 and 2.27 ms with transposed ones.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

# Up to this many rows the input gradient is also computed transposed, and transposed back.
_FEW_ROWS = 64


def add_weight_gradients(module: nn.Module) -> list[nn.Module]:
    """Make linear layers of `module` accumulate weight gradients in place; returns the layers.

    Any backward through them sets the weight gradients, even one that asks only for other gradients. Layers
    whose forward was replaced before keep it.
    """
    layers = [m for m in module.modules() if type(m) is nn.Linear and "forward" not in m.__dict__]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    return list(layers)


def transpose_weights(module: nn.Module, shared: Collection[Parameter] = ()) -> None:
    """Store the weights of linear layers with the output axis innermost; shapes and values stay the same.

    Weights that are tied, in `module` or as one of `shared`, are not changed.
    """
    owners_of: dict[Parameter, list[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                owners_of.setdefault(parameter, []).append(owner)
    for parameter, owners in owners_of.items():
        alone = len(owners) == 1 and not any(parameter is other for other in shared)
        if alone and type(owners[0]) is nn.Linear and parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


def with_same_strides(parameter: Tensor, value: Any) -> Any:
    """Optimizer state `value`, with the strides of `parameter`, which makes updates faster."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    same = value.stride() == parameter.stride()
    return value if same else torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if not _adds(layer.weight, layer.bias):
        return F.linear(x, layer.weight, layer.bias)
    if x.dim() == 2:
        return _apply(x, layer.weight, layer.bias)
    y = _apply(x.reshape(-1, x.shape[-1]), layer.weight, layer.bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def _adds(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether both are trained parameters, and autocast does not cast them."""
    return (
        torch.is_grad_enabled()
        and is_trained(weight)
        and (bias is None or is_trained(bias))
        and not torch.is_autocast_enabled(weight.device.type)
    )


def is_trained(tensor: Tensor) -> bool:
    """Whether it is a parameter that requires a gradient and has no hooks on it."""
    hooks = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    return isinstance(tensor, Parameter) and tensor.requires_grad and not hooks


def _apply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = _AddingLinear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _AddingLinear(torch.autograd.Function):
    """A linear layer on rows. Its backward runs for every microbatch, so it makes few calls."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.leaves = weight, bias
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        rows, weight = ctx.saved_tensors
        leaf, bias = ctx.leaves
        if bias is not None:
            add_sum(bias, grad)
        add_product(leaf, grad, rows)
        return (input_gradient(grad, weight) if ctx.needs_input_grad[0] else None), None, None


def add_product(weight: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Add to the gradient of `weight`; a new gradient has the strides of the weight."""
    if weight.grad is not None:
        weight.grad.addmm_(grad.t(), rows)
    elif weight.is_contiguous():
        weight.grad = grad.t() @ rows
    else:
        weight.grad = (rows.t() @ grad).t()


def add_sum(bias: Tensor, grad: Tensor) -> None:
    """Add the sum of the rows of `grad` to the gradient of `bias`."""
    ones = grad.new_ones(len(grad))
    if bias.grad is None:
        bias.grad = grad.t() @ ones
    else:
        bias.grad.addmv_(grad.t(), ones)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a linear layer's input."""
    if len(grad) > _FEW_ROWS or weight.is_contiguous():
        return grad @ weight
    return (weight.t() @ grad.t()).t().contiguous()
