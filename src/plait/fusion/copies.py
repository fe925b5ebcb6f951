"""Copies of modules, with what deepcopy leaves behind: tensors of a forward, closures and gradient hooks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.closures import copied_closures
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch


def independent_copy(module: nn.Module, memo: dict[int, Any] | None = None, hooks: bool = True) -> nn.Module:
    """A deep copy; tensors that a forward stored in it are copied without autograd history.

    With `hooks`, gradient hooks of parameters are copied too, which deepcopy drops.
    """
    memo = {} if memo is None else memo
    for value in held_values(module):
        if isinstance(value, Tensor) and not isinstance(value, TrialTensor) and not value.is_leaf:
            memo.setdefault(id(value), value.detach().clone())
    # Under no_grad, as copies of scripted modules would keep autograd history.
    with torch.no_grad(), copied_closures(module):
        try:
            made = copy.deepcopy(module, memo)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, RuntimeError, NotImplementedError, AttributeError) as failure:
            line = " ".join(str(failure).split())[:200]
            raise FusionError(
                f"fuse: {type(module).__qualname__} cannot be copied ({type(failure).__name__}: {line}), "
                f"which fusing needs; train each model alone"
            ) from failure
    for parameter, copied in zip(module.parameters(), made.parameters()):
        if copied.requires_grad != parameter.requires_grad:
            copied.requires_grad_(parameter.requires_grad)
        for hook in gradient_hooks(parameter) if hooks and parameter is not copied else ():
            copied.register_hook(hook)
    return made


def copy_of_structure(module: nn.Module) -> nn.Module:
    """A copy of the modules, which holds the same parameters and buffers."""
    return independent_copy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """The gradient hooks of a parameter."""
    return list((parameter._backward_hooks or {}).values())


def copy_hooks(hooks: Sequence[Any], parameter: Tensor) -> None:
    """Register gradient hooks again that a copy has dropped."""
    if not gradient_hooks(parameter):
        for hook in hooks:
            parameter.register_hook(hook)


def held_values(module: nn.Module) -> list[Any]:
    """The tensors and `PerTrial`s in attributes of a module and its submodules, also within objects."""
    values: list[Any] = []
    seen: set[int] = set()
    waiting = [value for part in module.modules() for value in vars(part).values()]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            values.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(value, PerTrial):
            values.append(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, Patch)):
            waiting += vars(value).values()
    return values
