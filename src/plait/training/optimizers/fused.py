"""Torch's fused update kernels on CPUs: one pass over weights, gradients and state instead of one a formula.

Torch uses them only where asked to, and they ask more of their caller than the plain formulas: they walk
memory as it lies whatever the strides say, take no sparse gradients, and SGD's takes momentum from all of a
group's parameters or from none. So the choice is made before each step, from what the step will find.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_KINDS = (SGD, Adam, AdamW, Adagrad)
_TYPES = (torch.float32, torch.float64)


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Let `optimizer` step with fused kernels wherever these compute the same, and faster.

    Optimizers that are not torch's own, hold parameters on other devices, or were configured how to compute
    are left as they are.
    """
    # The constructor's `fused` would also let a loss scale skip steps inside the kernel, which leaves
    # momentum that nothing was written to if it is the first step.
    if type(optimizer) in _KINDS and all(_is_open(group) for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_choose)


def _is_open(group: dict[str, Any]) -> bool:
    """Whether nobody chose how this group is computed, and fused kernels gain something."""
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
        alike = all(states) or not any(states)
        group["fused"] = alike and all(map(_lies_alike, stepped, states))


def _lies_alike(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether parameter, gradient and state lie in memory in the common order.

    Of weights that lie turned the kernels take more than twice the time of plain steps.
    """
    grad = parameter.grad
    assert grad is not None
    if not parameter.is_contiguous() or grad.layout is not torch.strided or grad.dtype is not parameter.dtype:
        return False
    strides = parameter.stride()
    if grad.stride() != strides and not _same_places(grad, parameter):
        return False
    for key, value in state.items():
        if key != "step" and value.stride() != strides and not _same_places(value, parameter):
            return False
    return True


def _same_places(first: Tensor, second: Tensor) -> bool:
    """Whether strides that differ mean the same, since along an axis of one there is no step to take."""
    pairs = zip(first.shape, first.stride(), second.stride())
    return all(size == 1 or one == other for size, one, other in pairs)
