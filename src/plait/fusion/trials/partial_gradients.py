"""Gradients that only some trials have: those of the others are not even zeros, and change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plait.fusion.rules.hooks import of_fusion

# The attribute of a gradient that names the trials which have one; without it, all have.
_OF_TRIALS = "of_trials"


class DeliverGradient:
    """Gradient hook that adds one trial's gradient to the fused parameter's."""

    def __init__(self, stacked: nn.Parameter, number: int) -> None:
        self.stacked = stacked
        self.number = number

    def __call__(self, parameter: Tensor) -> None:
        own, of_all = parameter.grad, self.stacked.grad
        assert own is not None
        if of_all is None:
            of_all = self.stacked.grad = torch.zeros_like(self.stacked)
            of_all.__dict__[_OF_TRIALS] = set()
        of_all[self.number].add_(own)
        of_all.__dict__.get(_OF_TRIALS, set()).add(self.number)
        parameter.grad = None


def delivers(parameter: Tensor, stacked: Tensor) -> bool:
    """Whether the gradient of one trial's parameter is added to that of `stacked`."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, DeliverGradient) and hook.stacked is stacked for hook in hooks.values())


@of_fusion
def _has_all(stacked: Tensor) -> None:
    """Hook of a fused parameter: what autograd has added to its gradient itself is that of all trials."""
    if stacked.grad is not None:
        stacked.grad.__dict__.pop(_OF_TRIALS, None)


def note_others(stacked: nn.Parameter) -> None:
    """Let gradients be of all trials where the parameter is also used outside of what delivers them."""
    hooks = getattr(stacked, "_post_accumulate_grad_hooks", None) or {}
    if _has_all not in hooks.values():
        stacked.register_post_accumulate_grad_hook(_has_all)


def trials_without_gradient(parameter: Tensor, count: int) -> tuple[int, ...]:
    """The trials for which a fused parameter has no gradient."""
    known = () if parameter.grad is None else parameter.grad.__dict__.get(_OF_TRIALS)
    if known is None or len(known) == count:
        return ()
    return tuple(number for number in range(count) if number not in known)


def trials_without_gradients(parameters: Sequence[Tensor], count: int) -> list[tuple[int, ...]]:
    """The same for each of `parameters`, which have gradients; without a call for each."""
    return [
        trials_without_gradient(parameter, count) if _OF_TRIALS in parameter.grad.__dict__ else ()
        for parameter in parameters
    ]


def note_trials(parameter: Tensor, trials: Sequence[int]) -> None:
    """Set the trials that have a gradient of a fused parameter; none given means all."""
    if parameter.grad is not None:
        parameter.grad.__dict__.pop(_OF_TRIALS, None)
        if trials:
            parameter.grad.__dict__[_OF_TRIALS] = set(trials)


def select_gradient(parameter: Tensor, gradient: Tensor | None, numbers: Sequence[int]) -> None:
    """Give a fused parameter, after others were selected, what trials had accumulated in `gradient`."""
    parameter.grad = None if gradient is None else gradient[list(numbers)]
    if gradient is not None and (known := gradient.__dict__.get(_OF_TRIALS)) is not None:
        assert parameter.grad is not None
        parameter.grad.__dict__[_OF_TRIALS] = {n for n, number in enumerate(numbers) if number in known}
