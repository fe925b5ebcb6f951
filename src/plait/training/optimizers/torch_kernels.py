"""Torch's fused update kernels on CPUs: one pass over weights, gradients and state instead of several.

Torch uses them only on request, and they are more restricted than the plain updates: they read memory in
storage order and ignore strides, take no sparse gradients, and SGD's needs momentum for all parameters of a
group or for none. So the choice is made before each step, from the gradients and state of that step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_KINDS = (SGD, Adam, AdamW, Adagrad)
_TYPES = (torch.float32, torch.float64)


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Let `optimizer` use fused kernels where they compute the same result faster.

    Custom optimizers, parameters on other devices, and groups with an explicit choice are left unchanged.
    """
    # The constructor's `fused` would also let a loss scale skip steps inside the kernel, which leaves
    # momentum uninitialized if it is the first step.
    if type(optimizer) in _KINDS and all(_is_open(group) for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_choose)


def _is_open(group: dict[str, Any]) -> bool:
    """Whether the user left the choice of kernels open for this group, and fused ones are faster."""
    chosen = group["fused"] is not None or group["foreach"] is not None
    other = group["differentiable"] or group.get("capturable", False)
    # SGD with a learning rate only is one pass anyway, which can write a new version without a copy.
    gains = group.get("momentum", 1) != 0 or group["weight_decay"] != 0
    known = all(p.device.type == "cpu" and p.dtype in _TYPES for p in group["params"])
    return not chosen and not other and gains and known


def _choose(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Set each group's kernels for the step that follows."""
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if p.grad is not None]
        states = [optimizer.state.get(p, {}) for p in stepped]
        consistent = all(states) or not any(states)
        group["fused"] = consistent and all(map(_has_same_strides, stepped, states))


def _has_same_strides(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether parameter, gradient and state are contiguous.

    On transposed weights the fused kernels are more than 2x slower.
    """
    grad = parameter.grad
    assert grad is not None
    if not parameter.is_contiguous() or grad.layout is not torch.strided or grad.dtype is not parameter.dtype:
        return False
    strides = parameter.stride()
    if grad.stride() != strides and not _equivalent_strides(grad, parameter):
        return False
    for key, value in state.items():
        if key != "step" and value.stride() != strides and not _equivalent_strides(value, parameter):
            return False
    return True


def _equivalent_strides(first: Tensor, second: Tensor) -> bool:
    """Whether the strides are equal except along axes of size 1, where they do not matter."""
    pairs = zip(first.shape, first.stride(), second.stride())
    return all(size == 1 or one == other for size, one, other in pairs)
