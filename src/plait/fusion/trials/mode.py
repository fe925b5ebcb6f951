"""The function mode of a fused forward: draws on tensors that all trials share are per trial too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from plait.fusion.dispatch.fallback import body_of, draw_marks, is_in_place
from plait.fusion.dispatch.made_tensors import MadeTensors
from plait.fusion.dispatch.one_trial import call_alone, stack_outcomes
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.refusals import (
    RANDOM,
    SharedTargetError,
    refuse_hidden_draws,
    refuse_random,
    refuse_shared_target,
)
from plait.fusion.dispatch.registry import RULES, Arguments, Function, Options, spellings
from plait.fusion.dispatch.tensor import Trials, TrialTensor, leaves, unwrap, wrap
from plait.fusion.errors import FusionError, user_line
from plait.fusion.rules.dropout import streams_of
from plait.fusion.rules.random_numbers import (
    ATTENTION,
    FILLS,
    NEW,
    OF_TENSORS,
    OPENED,
    RECURRENT,
    draw_new,
    is_new,
    with_tensor,
)
from plait.fusion.rules.recurrent import dropout_between
from plait.fusion.trials.separation import Separation

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DRAWS = OF_TENSORS | frozenset(spellings(_DROPOUTS))
_DRAWS_INSIDE = ATTENTION | RECURRENT | OPENED
_REFUSED = frozenset(spellings(RANDOM.split()))
_RANDOM = _DRAWS | _DRAWS_INSIDE | NEW | FILLS | _REFUSED


def refuse_within() -> None:
    """Raise FusionError where a function of one trial is running, which a fused module cannot be part of."""
    modes = (mode for mode in _get_current_function_mode_stack() if isinstance(mode, TrialMode))
    if not all(mode.trials.is_alone for mode in modes):
        raise FusionError(
            f"{user_line()}\n  calls a fused module within fused.map(...), fused.call(...) or a forward, "
            f"which see one trial",
            "call it on the result: other(fused(x)), and compute with what it returns in fused.map(...)",
        )


class TrialMode(TorchFunctionMode):
    """Intercepts each torch function of a fused forward, also on plain tensors."""

    def __init__(self, trials: Trials, separation: Separation | None = None) -> None:
        super().__init__()
        self.trials = trials
        self._separation = separation
        self._made = MadeTensors(trials)

    def current(self, outcome: Any) -> Any:
        """What a function returned, with the trials' copies in the place of what is not shared any more."""
        return outcome if self._separation is None else self._separation.current(outcome)

    def __enter__(self) -> TrialMode:
        self._draws = draw_marks()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None and self._draws != draw_marks():
            refuse_hidden_draws()

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
            if is_new(func, args, kwargs):
                rows = self.trials.rows
                if func is torch.randperm and rows is not None and args[:1] == (rows.length,):
                    return refuse_random(func, args, kwargs)  # each trial has its own number of rows
                drawn = draw_new(streams_of(self.trials), func, args, kwargs)
                return TrialTensor(drawn.requires_grad_(bool(kwargs.get("requires_grad"))), self.trials)
            if func in _DRAWS:
                args, kwargs = with_tensor(self._with_trials_axis, args, kwargs)
                return TrialTensor.compute(RULES[func], func, args, kwargs)
            if not _has_trials((args, kwargs)):
                if func in FILLS:
                    return self._fill(func, args, kwargs)
                inside = func in _DRAWS_INSIDE
                return (self._draw_inside if inside else refuse_random)(func, args, kwargs)
        # Calls on trial tensors are checked by `compute`.
        is_checked = not PerTrial.made_any or TrialTensor in types
        if not is_checked and (has_per_trial(args) or (kwargs and has_per_trial(kwargs.values()))):
            return self._each(func, args, kwargs)
        if types == (Tensor,) and len(args) == 2 and type(args[1]) is TrialTensor:  # a property is set
            types = (TrialTensor,)
        if types == (TrialTensor,):  # what torch would call next
            try:
                return TrialTensor.__torch_function__(func, types, args, kwargs)
            except SharedTargetError:
                if not (args and self._made.take(args[0])):
                    raise
            return self.__torch_function__(func, types, args, kwargs)
        outcome = func(*args, **kwargs)
        if TrialTensor not in types:
            self._made.note(func, args, kwargs, outcome)
        return outcome

    def _draw_inside(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        """A function on shared tensors: computed once, unless it draws numbers, which differ by trial."""
        if func in OPENED:
            with self:
                return body_of(func)(*args, **kwargs)
        if func in ATTENTION:
            draws = bool(args[4]) if len(args) > 4 else bool(kwargs.get("dropout_p"))
        else:
            dropout, training = dropout_between(args)
            draws = bool(dropout) and training
        if not draws:
            return func(*args, **kwargs)
        if args:
            return RULES[func](func, (self._with_trials_axis(args[0]), *args[1:]), kwargs)
        return RULES[func](func, args, {**kwargs, "query": self._with_trials_axis(kwargs["query"])})

    def _fill(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        """A tensor that is filled with numbers, from now on each trial's."""
        if not self._made.take(args[0]):
            return refuse_random(func, args, kwargs)
        return self.__torch_function__(func, (TrialTensor,), args, kwargs)

    def _each(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        """A call on shared tensors with a hyperparameter that differs by trial: one result per trial."""
        if _has_trials((args, kwargs)):
            return func(*args, **kwargs)
        if is_in_place(func):
            refuse_shared_target(func, args)
        outcomes = [call_alone(func, args, kwargs, trial) for trial in range(self.trials.count)]
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
