"""What one trial sees of values of all trials, and the results of all trials as one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.fusion.describe import describe
from plait.fusion.dispatch.padding import Rows
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.registry import Arguments, Function, Options
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.errors import FusionError, user_line


def one_trial(values: Any, trial: int, rows: Rows | None = None, cuts_shared: bool = False) -> Any:
    """`values` as one trial sees them: its slice of each trial tensor, its value of each hyperparameter.

    With `rows`, without padding rows; so are plain tensors of as many rows, if it `cuts_shared`.
    """
    # If some tensors are known to have rows, the others (such as class weights) have none.
    known = rows is not None and any(
        isinstance(x, TrialTensor) and x.rows_at is not None for x in pytree.tree_leaves(values)
    )

    def pick(value: Any) -> Any:
        if isinstance(value, TrialTensor):
            part = value.stacked[trial]
            return part if rows is None or (known and value.rows_at is None) else rows.cut(part, trial)
        if cuts_shared and type(value) is Tensor and rows is not None:
            return rows.cut(value, trial) if value.dim() and len(value) == rows.length else value
        return value.of(trial) if isinstance(value, PerTrial) else value

    return pytree.tree_map(pick, values)


def call_alone(function: Function, args: Arguments, kwargs: Options, trial: int) -> Any:
    """The result of a call as one trial sees its arguments."""
    return function(*one_trial(args, trial), **one_trial(kwargs, trial))


def stack_outcomes(outcomes: list[Any], trials: Trials, who: str = "", rows: Rows | None = None) -> Any:
    """Tensors are stacked to trial tensors, floats that differ are per trial, other values must be alike.

    With `rows`, padding is added to tensors without it. `who` is named where results do not fit together, by
    default the user's line.
    """
    flat, spec = zip(*(pytree.tree_flatten(outcome) for outcome in outcomes))
    if any(other != spec[0] for other in spec):
        raise FusionError(f"{user_line()}\n  returns a different structure in some trials")
    return pytree.tree_unflatten([_one_leaf(values, trials, who, rows) for values in zip(*flat)], spec[0])


def _one_leaf(values: tuple[Any, ...], trials: Trials, who: str, rows: Rows | None) -> Any:
    first = values[0]
    # Of one trial alone, nothing says that a tensor is shared.
    if all(value is first for value in values) and not (len(values) == 1 and isinstance(first, Tensor)):
        return first
    if all(isinstance(value, Tensor) for value in values):
        return TrialTensor(torch.stack(_in_one_shape(values, rows)), trials)
    if all(isinstance(value, float) for value in values):
        return first if len(set(values)) == 1 else PerTrial(values)
    if len({describe(value) for value in values}) == 1 and not _holds_tensors(first):
        return first
    if len({type(value) for value in values}) > 1 or not hasattr(first, "__dict__"):
        other = next(value for value in values if describe(value) != describe(first))
        raise FusionError(
            f"{who or user_line()} returns {first!r} in one trial and {other!r} in another, and the fused "
            f"model around it cannot use both; run the module that calls it trial by trial"
        )
    # An object of the user's class that holds each trial's tensors.
    made = copy.copy(first)
    for name in vars(first):
        made.__dict__[name] = stack_outcomes([getattr(value, name) for value in values], trials, who, rows)
    return made


def _in_one_shape(values: tuple[Tensor, ...], rows: Rows | None) -> list[Tensor]:
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) == 1:
        return list(values)
    if rows is not None and all(rows.can_fill(value, number) for number, value in enumerate(values)):
        filled = [rows.fill(value, number) for number, value in enumerate(values)]
        if len({tuple(value.shape) for value in filled}) == 1:
            return filled
    raise FusionError(
        f"{user_line()}\n  has different shapes in different trials: {shapes}; fused trials need one shape"
    )


def _holds_tensors(value: Any) -> bool:
    inner = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return any(isinstance(part, Tensor) for part in inner)
