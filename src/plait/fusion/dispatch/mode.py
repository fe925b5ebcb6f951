"""The function mode of a fused forward: draws on tensors that all trials share are per trial too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.fusion.dispatch.fallback import body_of, is_in_place
from plait.fusion.dispatch.one_trial import one_trial, stack_outcomes
from plait.fusion.dispatch.refusals import RANDOM, refuse_random, refuse_shared_target
from plait.fusion.dispatch.registry import RULES, Arguments, Function, Options, spellings
from plait.fusion.dispatch.separation import Separation, is_whole
from plait.fusion.dispatch.tensor import Trials, TrialTensor, leaves, unwrap, wrap
from plait.fusion.rules.dropout import NEW, draw_new, streams_of
from plait.fusion.trials.per_trial import PerTrial

_DRAWS = frozenset(spellings(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")))
_LIKE = frozenset((torch.rand_like, torch.randn_like, F.feature_alpha_dropout, *spellings(["bernoulli"])))
_ATTENTION = frozenset(spellings(["scaled_dot_product_attention"]))
_RECURRENT = frozenset(spellings(["lstm", "gru", "rnn_tanh", "rnn_relu"]))
# Functions with a dropout inside.
_DRAWS_INSIDE = _ATTENTION | _RECURRENT | {F.multi_head_attention_forward}
REFUSED = frozenset(spellings((*RANDOM.split(), "randint", "randperm")))
_RANDOM = _DRAWS | _LIKE | _DRAWS_INSIDE | NEW | REFUSED | {torch.Tensor.bernoulli_}


class TrialMode(TorchFunctionMode):
    """Intercepts each torch function of a fused forward, also on plain tensors."""

    def __init__(self, trials: Trials, separation: Separation | None = None) -> None:
        super().__init__()
        self.trials = trials
        self._separation = separation

    @property
    def filled(self) -> Sequence[tuple[Tensor, TrialTensor]]:
        """New tensors that were filled with each trial's numbers, with these."""
        return () if self._separation is None else tuple(self._separation.filled)

    def __torch_function__(
        self, func: Function, types: Any, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._separation is not None and not self.trials.is_alone:
            args, kwargs = self._separation(func, args, kwargs)
        # A generator is the user's, whose numbers are the same for all trials.
        if self.trials.is_alone or (kwargs and kwargs.get("generator") is not None):
            return func(*args, **kwargs)
        if func in _RANDOM:
            if func in _DRAWS or func in _LIKE:
                if not args:
                    args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
                return RULES[func](func, (self._with_trials_axis(args[0]), *args[1:]), kwargs)
            if func in NEW:
                drawn = draw_new(streams_of(self.trials), func, args, kwargs)
                return TrialTensor(drawn.requires_grad_(bool(kwargs.get("requires_grad"))), self.trials)
            if not _has_trials((args, kwargs)):
                if func is torch.Tensor.bernoulli_:
                    return self._fill(func, args, kwargs)
                inside = func in _DRAWS_INSIDE
                return (self._draw_inside if inside else refuse_random)(func, args, kwargs)
        # Calls on trial tensors are checked by `compute`.
        is_checked = not PerTrial.made_any or TrialTensor in types
        if not is_checked and (has_per_trial(args) or (kwargs and has_per_trial(kwargs.values()))):
            return self._each(func, args, kwargs)
        if types == (TrialTensor,):  # what torch would call next
            return TrialTensor.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def _draw_inside(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        """A function on shared tensors: computed once, unless it drops elements, which differ by trial."""
        if func is F.multi_head_attention_forward:
            with self:
                return body_of(func)(*args, **kwargs)
        if func in _ATTENTION:
            draws = bool(args[4]) if len(args) > 4 else bool(kwargs.get("dropout_p"))
        else:
            dropout, training = args[6:8] if isinstance(args[3], (list, tuple)) else args[5:7]
            draws = bool(dropout) and training
        if not draws:
            return func(*args, **kwargs)
        if args:
            return RULES[func](func, (self._with_trials_axis(args[0]), *args[1:]), kwargs)
        return RULES[func](func, args, {**kwargs, "query": self._with_trials_axis(kwargs["query"])})

    def _fill(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        """A new tensor that is filled with numbers: each trial's, also where the tensor is used later.

        The tensor itself becomes NaN: what reads it past the trials, as after the forward, must not go
        unnoticed.
        """
        x, *rest = args
        if not is_whole(x) or not x.is_floating_point():
            return refuse_random(func, args, kwargs)
        own = TrialTensor(x.new_empty((self.trials.count, *x.shape)), self.trials)
        filled = RULES[func](func, (own, *rest), kwargs)
        if self._separation is None:
            self._separation = Separation((), self.trials)
        self._separation.replace(x, filled)
        x.fill_(math.nan)
        return filled

    def _each(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        """A call on shared tensors with a hyperparameter that differs by trial: one result per trial."""
        if _has_trials((args, kwargs)):
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


def _has_trials(values: Any) -> bool:
    return any(isinstance(leaf, TrialTensor) for leaf in leaves(values))


def has_per_trial(values: Iterable[Any]) -> bool:
    """Whether a `PerTrial` is among the arguments of a call, or in a list among them."""
    for value in values:
        kind = type(value)
        if kind is PerTrial:
            return True
        if issubclass(kind, (list, tuple)) and any(type(part) is PerTrial for part in value):
            return True
    return False
