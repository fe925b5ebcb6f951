"""Computes a torch call on trial tensors: by its rule, or by a fallback."""

from __future__ import annotations

from typing import Any

from torch._C._functorch import peek_interpreter_stack

from plait.fusion.dispatch import alias_links
from plait.fusion.dispatch.fallback import (
    find_rule,
    is_in_place,
    loop,
    recover,
    refuse_outside,
    refuse_transformed,
)
from plait.fusion.dispatch.registry import (
    PER_TRIAL_RULES,
    READING_RULES,
    RULES,
    Arguments,
    Function,
    Options,
    Rule,
    usual_form,
)
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.dispatch.torch_patches import is_running
from plait.fusion.trials import padding
from plait.fusion.trials.per_trial import PerTrial
from plait.fusion.trials.rows import follow


def compute(rule: Rule | None, function: Function, args: Arguments, kwargs: Options) -> Any:
    """The result of `function` for all trials; `rule` is None if the table has none yet."""
    if rule is None:
        rule = RULES[function] = find_rule(function)
    if rule in READING_RULES:
        return rule(function, args, kwargs)
    if not is_running():
        refuse_outside(function)
    if peek_interpreter_stack() is not None:
        refuse_transformed(function)
    if kwargs:
        args, kwargs = usual_form(function, args, kwargs)
    if PerTrial.made_any and rule not in PER_TRIAL_RULES and _differs_by_trial(args, kwargs):
        rule = loop
    before = _version(args) if alias_links.made else None
    try:
        outcome = rule(function, args, kwargs)
    except Exception as failure:
        outcome = recover(rule, function, args, kwargs, failure)
    if before is not None and (before != _version(args) or (before < 0 and is_in_place(function))):
        alias_links.repeat_writes(args[0].stacked)
    if padding.used:
        follow(function, args, kwargs, outcome)
    return outcome


def _version(args: Arguments) -> int | None:
    """The version counter of the first argument, or -1 in inference mode, which has none."""
    first = args[0] if args else None
    if not isinstance(first, TrialTensor) or first.pending is not None:
        return None
    version: int = -1 if first.stacked.is_inference() else first.stacked._version
    return version


def _differs_by_trial(args: Arguments, kwargs: Options) -> bool:
    return PerTrial in map(type, args) or (bool(kwargs) and PerTrial in map(type, kwargs.values()))


TrialTensor.compute = staticmethod(compute)
