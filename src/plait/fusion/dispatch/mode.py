"""The function mode of a fused forward: draws on tensors that all trials share are per trial too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.fusion.dispatch.fallback import (
    RANDOM,
    is_in_place,
    one_trial,
    refuse_random,
    refuse_shared_target,
    stack_outcomes,
)
from plait.fusion.dispatch.registry import RULES, Arguments, Function, Options, spellings
from plait.fusion.dispatch.tensor import Trials, TrialTensor, leaves, unwrap, wrap
from plait.fusion.rules.dropout import NEW, draw_new, streams_of
from plait.fusion.trials.per_trial import PerTrial

_DRAWS = frozenset(spellings(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")))
_LIKE = frozenset((torch.rand_like, torch.randn_like, F.feature_alpha_dropout))
REFUSED = frozenset(spellings((*RANDOM.split(), "randint", "randperm")))


class TrialMode(TorchFunctionMode):
    """Intercepts each torch function of a fused forward, also on plain tensors."""

    def __init__(self, trials: Trials) -> None:
        super().__init__()
        self.trials = trials

    def __torch_function__(
        self, func: Function, types: Any, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A generator is the user's, whose numbers are the same for all trials.
        if self.trials.is_alone or (kwargs and kwargs.get("generator") is not None):
            return func(*args, **kwargs)
        if func in _DRAWS or func in _LIKE:
            return RULES[func](func, (self._with_trials_axis(args[0]), *args[1:]), kwargs)
        if func in NEW:
            drawn = draw_new(streams_of(self.trials), func, args, kwargs)
            return TrialTensor(drawn.requires_grad_(bool(kwargs.get("requires_grad"))), self.trials)
        if func in REFUSED and not any(isinstance(leaf, TrialTensor) for leaf in leaves(args)):
            return refuse_random(func, args, kwargs)
        # Calls on trial tensors are checked by `compute`.
        is_checked = not PerTrial.made_any or TrialTensor in types
        if not is_checked and (has_per_trial(args) or (kwargs and has_per_trial(kwargs.values()))):
            return self._each(func, args, kwargs)
        if types == (TrialTensor,):  # what torch would call next
            return TrialTensor.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def _each(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        """A call on shared tensors with a hyperparameter that differs by trial: one result per trial."""
        if any(isinstance(leaf, TrialTensor) for leaf in leaves((args, kwargs))):
            return func(*args, **kwargs)
        if is_in_place(func):
            refuse_shared_target(func, args)
        outcomes = [
            func(*one_trial(args, trial), **one_trial(kwargs, trial)) for trial in range(self.trials.count)
        ]
        return stack_outcomes(outcomes, self.trials)

    def _with_trials_axis(self, x: Tensor) -> TrialTensor:
        if isinstance(x, TrialTensor):
            return x
        expanded: TrialTensor = wrap(unwrap(x, self.trials), self.trials)
        return expanded


def has_per_trial(values: Iterable[Any]) -> bool:
    """Whether a `PerTrial` is among the arguments of a call, or in a list among them."""
    for value in values:
        kind = type(value)
        if kind is PerTrial:
            return True
        if issubclass(kind, (list, tuple)) and any(type(part) is PerTrial for part in value):
            return True
    return False
