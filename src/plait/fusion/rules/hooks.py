"""Per-trial gradient hooks, and setters of tensor properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.refusals import refuse_passed_by, refuse_shared_target
from plait.fusion.dispatch.registry import RULES, Arguments, Function, Options, getter
from plait.fusion.dispatch.tensor import Trials, TrialTensor, unwrap
from plait.fusion.errors import FusionError, user_line

GradientHook = Callable[[Tensor], Tensor | None]


def of_fusion(hook: Any) -> Any:
    """Mark a hook that fusion registers on a fused parameter, since the trials' own modules need none."""
    hook.__dict__["of_fusion"] = True
    return hook


def foreign_hooks(parameter: Tensor) -> bool:
    """Whether others have registered hooks on the gradient of a fused parameter."""
    registered = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(
        not getattr(hook, "of_fusion", False) for hooks in registered if hooks for hook in hooks.values()
    )


def each_trial(hooks: list[list[GradientHook]]) -> Callable[[Tensor], Tensor]:
    """A hook on the gradient of all trials that passes each trial's slice to the hooks of that trial."""

    def apply(gradient: Tensor) -> Tensor:
        parts = []
        for trial_hooks, each in zip(hooks, gradient):
            value = each
            for hook in trial_hooks:
                changed = hook(value)
                value = value if changed is None else changed
            parts.append(value)
        return torch.stack(parts)

    of_fusion(apply)
    return apply


def differentiated(x: Tensor, trials: Trials) -> Tensor:
    """The tensor of all trials whose gradient is asked for; raises FusionError if parts of that passed by."""
    if isinstance(x, TrialTensor) and x.is_passed_by:
        refuse_passed_by()
    return unwrap(x, trials)


def register_hook(function: Function, args: Arguments, kwargs: Options) -> Any:
    x, hook = args
    return differentiated(x, x.trials).register_hook(each_trial([[hook]] * x.trials.count))


def retain_grad(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    return differentiated(x, x.trials).retain_grad()


def gradient(function: Function, args: Arguments, kwargs: Options) -> Any:
    grad = args[0].stacked.grad
    return None if grad is None else TrialTensor(grad, args[0].trials)


def set_data(function: Function, args: Arguments, kwargs: Options) -> None:
    """Set `tensor.data`, in all trials."""
    refuse_shared_target(function, args)
    x, value = args
    inner = unwrap(value, x.trials).detach()
    x.stacked.data = inner if isinstance(value, TrialTensor) else inner.clone()


def set_requires_grad(function: Function, args: Arguments, kwargs: Options) -> None:
    args[0].stacked.requires_grad = args[1]


def set_gradient(function: Function, args: Arguments, kwargs: Options) -> None:
    refuse_shared_target(function, args)
    x, value = args
    x.stacked.grad = None if value is None else unwrap(value, x.trials).clone()


def refuse_set(function: Function, args: Arguments, kwargs: Options) -> None:
    raise FusionError(
        f"{user_line()}\n  sets a property of a tensor, which fused trials do not support",
        "name this module in fuse(..., unfused=[...])",
    )


_SETTERS = {"data": set_data, "requires_grad": set_requires_grad, "grad": set_gradient, "_grad": set_gradient}
for _name, _member in vars(torch._C.TensorBase).items():
    if type(_member).__name__ == "getset_descriptor":
        RULES[_member.__set__] = _SETTERS.get(_name, refuse_set)
RULES[torch.Tensor.register_hook] = register_hook
RULES[torch.Tensor.retain_grad] = retain_grad
RULES[getter("grad")] = gradient
