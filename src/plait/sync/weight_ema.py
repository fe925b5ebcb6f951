"""The exponential moving average (EMA) of weights over steps, as part of an optimizer's state.

So it goes wherever the state goes: into checkpoints by parameter name, to the worker that holds the
parameter, into the mean of workers that average, and to another trial or array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# The key in the state of a parameter.
EMA = "ema"
_DECAY, _EVALUATES = "ema_decay_of_plait", "ema_evaluates_of_plait"


def keep_ema(optimizer: torch.optim.Optimizer, decay: float, evaluates: bool) -> None:
    """Let `optimizer` keep an EMA of each parameter that it updates: decay * EMA + (1 - decay) * weight.

    It begins with the weight before the first update. If it `evaluates`, the optimizer has modes, as
    schedule-free ones do: between its `eval` and `train` the EMA takes the place of the weights.
    """
    before: dict[Tensor, Tensor] = {}

    def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Not in the state yet: an optimizer may take a parameter without state for one without steps.
        for parameter in _updated(optimizer):
            if EMA not in optimizer.state.get(parameter, {}):
                before[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _updated(optimizer):
            state = optimizer.state[parameter]
            if EMA not in state:
                state[EMA] = before.pop(parameter)
            state[EMA].lerp_(parameter.detach(), 1.0 - decay)

    is_training = True

    def set_training(training: bool) -> None:
        nonlocal is_training
        if training != is_training:
            is_training = training
            swap_ema(optimizer)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(update)
    vars(optimizer).update({_DECAY: decay, _EVALUATES: evaluates})
    if evaluates:
        vars(optimizer).update(eval=lambda: set_training(False), train=lambda: set_training(True))


def decay_of(optimizer: torch.optim.Optimizer) -> float | None:
    """The decay of the EMA that an optimizer keeps; None if it keeps none."""
    decay: float | None = vars(optimizer).get(_DECAY)
    return decay


def evaluates_ema(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the EMA takes the place of the weights in evaluations."""
    return bool(vars(optimizer).get(_EVALUATES))


@torch.no_grad()
def swap_ema(optimizer: torch.optim.Optimizer) -> None:
    """Let each weight and its EMA take the place of the other."""
    state: Mapping[Tensor, Mapping[str, Any]] = optimizer.state
    for parameter, values in state.items():
        if (ema := values.get(EMA)) is not None:
            weight = parameter.detach().clone()
            parameter.copy_(ema)
            ema.copy_(weight)


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
