"""Computes a torch call on trial tensors: by its rule, or by a fallback."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from plait.fusion.dispatch import alias_links, padding
from plait.fusion.dispatch.batch_axis import follow
from plait.fusion.dispatch.fallback import find_rule, is_in_place, loop, may_write, recover
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.refusals import refuse_out, refuse_outside, refuse_transformed
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
from plait.fusion.dispatch.torch_patches import RUNNING


def compute(rule: Rule | None, function: Function, args: Arguments, kwargs: Options) -> Any:
    """The result of `function` for all trials; `rule` is None if the table has none yet."""
    if rule is None:
        rule = RULES[function] = find_rule(function)
        if rule in READING_RULES:
            return rule(function, args, kwargs)
    if not RUNNING:
        refuse_outside(function)
    if peek_interpreter_stack() is not None:
        refuse_transformed(function)
    if kwargs:
        if kwargs.get("out") is not None:
            refuse_out()
        args, kwargs = usual_form(function, args, kwargs)
    if PerTrial.made_any and rule not in PER_TRIAL_RULES and PerTrial in map(type, (*args, *kwargs.values())):
        rule = loop
    written = _aliased(args) if alias_links.made and may_write(function) else None
    before = -1 if written is None or written.is_inference() else written._version
    try:
        outcome = rule(function, args, kwargs)
    except Exception as failure:
        outcome = recover(rule, function, args, kwargs, failure)
    # In inference mode there are no version counters.
    if written is not None and (written._version != before if before >= 0 else is_in_place(function)):
        alias_links.repeat_writes(args[0].stacked)
    if padding.used:
        follow(function, args, kwargs, outcome)
    return outcome


def _aliased(args: Arguments) -> Tensor | None:
    """The tensor that a call may write to, with all trials: that of its first argument."""
    first = args[0] if args else None
    return first.stacked if isinstance(first, TrialTensor) and first.pending is None else None


TrialTensor.compute = staticmethod(compute)
