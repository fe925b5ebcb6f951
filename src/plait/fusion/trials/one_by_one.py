"""Runs functions trial by trial on plain tensors, inside of a fused forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.one_trial import one_trial, stack_outcomes
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.tensor import Trials
from plait.fusion.errors import FusionError, user_line
from plait.fusion.trials.mode import TrialMode
from plait.fusion.trials.row_wise import call_once, is_row_wise, rows_at
from plait.fusion.trials.single_trial import SingleTrialMode


@contextmanager
def one_by_one(trials: Trials, after: Streams | None = None) -> Iterator[list[Streams]]:
    """Context in which trials run one by one on plain tensors; gives each one's random stream.

    `after` is one of the streams with which the same code ran before, and probably made the same draws.
    """
    assert trials.streams is not None, "trials ran outside of their fused model"
    singles = [trials.streams.of_trial(number, after) for number in range(trials.count)]
    before, trials.is_alone = trials.is_alone, True
    # The mode of the fused forward would but pass each call on.
    is_on_top = isinstance(_get_current_function_mode(), TrialMode)
    try:
        with _pop_mode_temporarily() if is_on_top else nullcontext():
            yield singles
    finally:
        trials.is_alone = before
    trials.streams.follow(singles)


def apply_alone(
    trials: Trials, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of `function`, such as a custom autograd function, for each trial, on plain tensors."""
    shared = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is Tensor]
    shared = [leaf for leaf in shared if not leaf.is_inference()]  # which have no version counters
    versions = [leaf._version for leaf in shared]
    outcome = _applied(trials, function, args, kwargs)
    if trials.count > 1 and versions != [leaf._version for leaf in shared]:
        raise FusionError(
            f"{user_line()}\n  calls {getattr(function, '__qualname__', 'a function')}, which writes to an "
            f"argument that all trials share",
            "name the module in fuse(..., unfused=[...])",
        )
    return outcome


def _applied(
    trials: Trials, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if (at := rows_at(args, kwargs)) is not None:
        with one_by_one(trials):
            if is_row_wise(function, args, kwargs, at):
                return call_once(function, args, kwargs, at)
    outcomes = []
    with one_by_one(trials) as singles:
        for number, streams in enumerate(singles):
            trial_args, trial_kwargs = one_trial((args, kwargs), number)
            with SingleTrialMode(streams):
                outcomes.append(function(*trial_args, **trial_kwargs))
    return stack_outcomes(outcomes, trials, getattr(function, "__qualname__", "a function"), trials.rows)
