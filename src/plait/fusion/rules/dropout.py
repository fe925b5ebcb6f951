"""Dropout of every kind, with a random stream and a probability per trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.batch_axis import MIXED, require_rows_first
from plait.fusion.dispatch.per_trial import PerTrial, of_trials, on_device
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.registry import Arguments, Function, Options, arguments_of, rule, takes_per_trial
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.kernels import can_run_on

_NAMES = "input p training inplace"
# Draws numbers of shape (trials, *shape) from streams.
Draws = Callable[[Streams, tuple[int, ...]], Tensor]


def streams_of(trials: Trials) -> Streams:
    assert trials.streams is not None, "a draw outside of a fused forward"
    return trials.streams


def chance_of(p: float) -> float | tuple[float, ...]:
    return p.values if isinstance(p, PerTrial) else float(p)


def drop(inner: Tensor, p: float, trials: Trials) -> Tensor:
    """`inner`, batch first, with elements dropped per trial."""
    streams, chance = streams_of(trials), chance_of(p)
    if can_run_on(inner):
        from plait.fusion.kernels import dropout as kernels  # needs Triton

        if kernels.supports(inner) and (mask := streams.mask(chance)) is not None:
            return kernels.dropped(inner, mask)
    return inner * streams.keep(tuple(inner.shape[1:]), chance, inner.dtype)


def drawn(x: TrialTensor, shape: tuple[int, ...], draw: Draws, each: Sequence[Draws] | None = None) -> Tensor:
    """Random numbers for `x` of shape (trials, *shape); in a padded batch equal to those of an unpadded one.

    Numbers are drawn in the order of elements, so padding rows at the end do not change earlier ones. If the
    batch is not the first axis, each trial draws separately for its rows, by its function in `each`.
    """
    rows, at, streams = x.trials.rows, x.rows_at, streams_of(x.trials)
    if rows is None or not at or shape[at] == 1:
        return draw(streams, shape)
    if at == MIXED:
        require_rows_first("a random draw", x)
    singles = [streams.of_trial(number) for number in range(x.trials.count)]
    parts = []
    for number, single in enumerate(singles):
        count = rows.counts[number] * rows.times(shape[at])
        part = (draw if each is None else each[number])(single, (*shape[:at], count, *shape[at + 1 :]))
        index = torch.arange(shape[at], device=part.device).clamp(max=count - 1)
        parts.append(part.index_select(at + 1, index))
    streams.follow(singles)
    return torch.cat(parts)


def keep(x: TrialTensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """The dropout mask: 1 / (1 - p) or 0, for elements, or for slices along axes where `shape` is 1."""
    kind = x.stacked.dtype
    chances = p.values if isinstance(p, PerTrial) else (float(p),) * x.trials.count
    each = [lambda streams, own, q=q: streams.keep(own, q, kind) for q in chances]
    return drawn(x, shape, lambda streams, own: streams.keep(own, chance_of(p), kind), each)


@takes_per_trial
@rule("dropout", "dropout_")
def dropout(function: Function, args: Arguments, kwargs: Options) -> Any:
    x, p, active = _given(args, kwargs)
    if not active:
        return x
    if x.trials.rows is None or not x.rows_at:
        return _put(x, drop(x.stacked, p, x.trials), args, kwargs)
    return _put(x, x.stacked * keep(x, p, tuple(x.shape)), args, kwargs)


@takes_per_trial
@rule("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_")
def feature_dropout(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Dropout of whole channels of (batch, channels, ...), or of (channels, ...)."""
    x, p, active = _given(args, kwargs)
    if not active:
        return x
    return _put(x, x.stacked * keep(x, p, _channels(function, x)), args, kwargs)


def _channels(function: Function, x: Tensor) -> tuple[int, ...]:
    spatial = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}.get(function.__name__, x.dim() - 2)
    # F.dropout2d treats three axes as a batch (see torch's warning); the others treat them as one sample.
    leading = max(x.dim() - spatial, 1) if function.__name__ != "dropout2d" or x.dim() != 3 else 2
    return (*x.shape[:leading], *(1,) * (x.dim() - leading))


@takes_per_trial
@rule("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_")
def alpha_dropout(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Dropout that keeps the mean and the variance of SELU's outputs."""
    x, p, active = _given(args, kwargs)
    if not active:
        return x
    shape = tuple(x.shape)
    if "feature" in function.__name__:
        shape = (*shape[:2], *(1,) * (x.dim() - 2))
    low = -1.7580993408473766  # -alpha x scale of SELU
    values = p.values if isinstance(p, PerTrial) else (float(p),)
    scales = [1.0 / math.sqrt((1 - q) * (1 + q * low * low)) if q < 1 else 0.0 for q in values]
    scale, chance = (
        of_trials(on_device(each, x.dtype, x.device), x.stacked) for each in (tuple(scales), values)
    )
    kept = keep(x, p, shape) > 0
    dropped = torch.where(kept, x.stacked, low) * scale - low * chance * scale
    return _put(x, dropped, args, kwargs)


def _given(args: Arguments, kwargs: Options) -> tuple[TrialTensor, float, bool]:
    given = arguments_of(_NAMES, {"p": 0.5, "training": True}, args, kwargs)
    p, training = given["p"], given.get("train", given["training"])
    off = not training or (not isinstance(p, PerTrial) and p == 0)
    return given["input"], p, not off


def _put(x: TrialTensor, outcome: Tensor, args: Arguments, kwargs: Options) -> TrialTensor:
    inplace = kwargs.get("inplace", args[3] if len(args) > 3 else False)
    if inplace:
        x.stacked.copy_(outcome)
        return x
    return TrialTensor(outcome, x.trials)
