"""Functions of separate images or channels: trials are folded into the batch or the channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.registry import RULES, Arguments, Function, Options, arguments_of, rule, spellings
from plait.fusion.dispatch.tensor import TrialTensor, trials_of, unwrap, wrap
from plait.fusion.kernels import can_run_on
from plait.fusion.rules.convolution import fold_channels, unfold_channels
from plait.fusion.rules.reductions import shift

_POOLS = "max_pool avg_pool adaptive_max_pool adaptive_avg_pool"
_MAX_POOL = "input kernel_size stride padding dilation ceil_mode return_indices"
_DEFAULTS: Options = {"stride": (), "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}


def pool(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Pooling; for images without a batch axis the trials are the batch."""
    x = args[0] if args else kwargs["input"]
    rest = {k: v for k, v in kwargs.items() if k != "input"}
    spatial = _SPATIAL[function]
    if function in _TO_MEANS and args[1:] and _is_one(args[1]) and x.numel():
        return wrap(x.stacked.mean(tuple(range(-spatial, 0)), keepdim=True), x.trials)
    if x.dim() == spatial + 1:
        return wrap(function(x.stacked, *args[1:], **rest), x.trials)
    if function in _TO_MAXIMA and (largest := _by_kernel(x.stacked, args, kwargs)) is not None:
        return wrap(largest, x.trials)
    count = x.trials.count
    if x.stacked.stride(0) == x.stacked.stride(1) * x.stacked.shape[1]:
        outcome = function(x.stacked.flatten(0, 1), *args[1:], **rest)
        return wrap(_each(outcome, lambda y: y.unflatten(0, (count, -1))), x.trials)
    outcome = function(fold_channels(x.stacked), *args[1:], **rest)
    return wrap(_each(outcome, lambda y: unfold_channels(y, count)), x.trials)


def _by_kernel(x: Tensor, args: Arguments, kwargs: Options) -> Tensor | None:
    """The largest of each window by our kernel; None if it does not support this."""
    if not can_run_on(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return None
    from plait.fusion.kernels.max_pool import fits, max_pool  # needs Triton

    given = arguments_of(_MAX_POOL, _DEFAULTS, args, kwargs)
    if given["dilation"] not in (1, (1, 1), [1, 1]) or given["ceil_mode"] or given["return_indices"]:
        return None
    kernel, stride, pad = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (given["kernel_size"], given["stride"] or given["kernel_size"], given["padding"])
    )
    return max_pool(x, kernel, stride, pad) if fits(x, kernel, stride, pad) else None


def _each(outcome: Any, function: Function) -> Any:
    return function(outcome) if isinstance(outcome, Tensor) else tuple(function(part) for part in outcome)


def _is_one(size: Any) -> bool:
    """Whether all pixels of an image make one."""
    return size == 1 if type(size) is int else type(size) in (tuple, list) and set(size) == {1}


_TO_MAXIMA = frozenset(spellings(["max_pool2d"]))
_TO_MEANS = frozenset(spellings(f"adaptive_avg_pool{dims}d" for dims in (1, 2, 3)))
_SPATIAL: dict[Function, int] = {}
for _kind in _POOLS.split():
    for _dims in (1, 2, 3):
        for _spelling in spellings((f"{_kind}{_dims}d", f"{_kind}{_dims}d_with_indices")):
            _SPATIAL[_spelling] = _dims
            RULES[_spelling] = pool


@rule("interpolate", "upsample", "unfold", "fold", "grid_sample", "affine_grid")
def per_image(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Functions of a batch of images; trials are folded into the batch."""
    if isinstance(args[0], TrialTensor) and function is torch.Tensor.unfold:
        x, dim = args[0], args[1] if len(args) > 1 else kwargs.pop("dimension")
        return TrialTensor(x.stacked.unfold(shift(dim), *args[2:], **kwargs), x.trials)
    trials = trials_of(args, kwargs)

    def fold(value: Any) -> Any:
        return unwrap(value, trials).flatten(0, 1) if isinstance(value, Tensor) else value

    given = {name: fold(value) for name, value in kwargs.items()}
    if function.__name__ == "affine_grid":
        size = args[1] if len(args) > 1 else given.pop("size")
        args = (args[0], (size[0] * trials.count, *size[1:]), *args[2:])
    outcome = function(*(fold(value) for value in args), **given)
    return wrap(outcome.unflatten(0, (trials.count, -1)), trials)


@rule("pixel_shuffle", "pixel_unshuffle")
def shuffle(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Pixel shuffle, which supports any number of leading axes."""
    return TrialTensor(function(args[0].stacked, *args[1:], **kwargs), args[0].trials)
