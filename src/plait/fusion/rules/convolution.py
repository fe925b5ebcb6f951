"""Convolutions: as grouped convolutions, as batched matrix products, or by our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.dispatch.registry import Arguments, Function, Options, arguments_of, rule
from plait.fusion.dispatch.tensor import TrialTensor, trials_of, unwrap, wrap
from plait.fusion.kernels import HALF, can_run_on
from plait.fusion.rules.dense import batched_linear
from plait.fusion.speed.autotune import Way, choose, chosen
from plait.fusion.speed.gpu_parts import parts_of
from plait.fusion.speed.lazy_activation import PendingActivation
from plait.fusion.speed.lazy_reads import Watched, like_of

_NAMES = "input weight bias stride padding dilation groups"
# Of the axis with one row that images of one spatial axis get.
_OF_ONE_ROW = (("stride", 1), ("padding", 0), ("dilation", 1))
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
# Below, passes over memory cost less than to think about them.
_LEAST_ELEMENTS = 1 << 18
_DEFAULTS: Options = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "output_padding": 0,
}


def fold_channels(x_tbc: Tensor) -> Tensor:
    """(trials, batch, channels, ...) as (batch, trials x channels, ...); a view if the strides allow it."""
    return x_tbc.movedim(0, 1).flatten(1, 2)


def unfold_channels(folded: Tensor, count: int) -> Tensor:
    """The inverse of `fold_channels`, without a copy."""
    return torch.unflatten(folded, 1, (count, -1)).movedim(1, 0)


@rule("conv1d", "conv2d", "conv3d")
def convolution(function: Function, args: Arguments, kwargs: Options) -> Any:
    given = arguments_of(_NAMES, _DEFAULTS, args, kwargs)
    x, weight = given["input"], given["weight"]
    trials = trials_of(x, weight)
    if not isinstance(weight, TrialTensor):
        return _with_one_weight(function, given, _NAMES)
    spatial = weight.dim() - 2
    if x.dim() == spatial + 1:
        return convolution(function, (x.unsqueeze(0), *args[1:]), kwargs).squeeze(0)
    options = {name: given[name] for name in ("stride", "padding", "dilation")}
    bias = None if given["bias"] is None else unwrap(given["bias"], trials)
    if not isinstance(x, TrialTensor) and given["groups"] == 1:
        flat_bias = None if bias is None else bias.reshape(-1)
        wide = function(x, weight.stacked.flatten(0, 1), flat_bias, **options)
        return wrap(unfold_channels(wide, trials.count), trials)
    inner = unwrap(x, trials)
    outcome = _per_trial(function, inner, weight.stacked, bias, options, given["groups"])
    if isinstance(outcome, PendingActivation):
        return TrialTensor(outcome.like, trials, outcome)
    return wrap(outcome, trials)


def _with_one_weight(function: Function, given: Options, names: str) -> Any:
    """A convolution whose weight all trials share: the images of all trials are one batch."""
    x, weight, bias = given["input"], given["weight"], given["bias"]
    trials = trials_of(x, bias)
    options = {name: given[name] for name in names.split()[3:]}
    own = None if isinstance(bias, TrialTensor) else bias
    if not isinstance(x, TrialTensor):
        outcome = wrap(unwrap(function(x, weight, own, **options), trials), trials)
    elif x.dim() == weight.dim() - 1:  # one image of each trial
        outcome = wrap(function(x.stacked, weight, own, **options), trials)
    else:
        images = function(x.stacked.flatten(0, 1), weight, own, **options)
        outcome = wrap(images.unflatten(0, x.stacked.shape[:2]), trials)
    if own is bias:
        return outcome
    return outcome + bias.view(-1, *(1,) * (weight.dim() - 2))


def _per_trial(
    function: Function, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, groups: int
) -> Tensor | PendingActivation:
    given = tuple([tuple(each) if type(each) is list else each for each in options.values()])
    numbers, is_pointwise = _numbers(tuple(options), given, weight.shape[3:])
    geometry = (numbers["stride"], numbers["padding"], numbers["dilation"])
    if groups == 1 and not is_pointwise and (read := _taps_read(x.shape[3:], weight.shape[3:], *geometry)):
        part: Any = (..., *read[0])
        (weight,) = parts_of(weight, lambda whole: (whole[part],))
        return _per_trial(function, x, weight, bias, {**numbers, "padding": read[1]}, groups)
    if groups == 1 and is_pointwise:
        # As of means of all pixels; without a bias a norm follows, whose kernels want another order of axes.
        if bias is not None and x.shape[3:].numel() == 1:
            made = batched_linear(x.flatten(2), weight.flatten(2), bias)
            return made.view(*made.shape, *x.shape[3:])
        if _has_kernel(x) and x.dim() < 6:
            return _pointwise_gathered(x, weight, bias)
        return choose("pointwise", _POINTWISE, x, weight, bias)
    if groups == 1 and weight.dim() == 5 and "same" not in numbers["padding"]:
        operation, ways = _fitting(function, tuple(numbers.items()), _needs_channels_last(x))
        if _can_wait(x, weight) and chosen(operation, ways, x, weight, bias) == "gathered":
            return _pending(function, x, weight, bias, numbers)
        return choose(operation, ways, x, weight, bias)
    if _is_depthwise(weight, groups) and "same" not in numbers["padding"] and _has_kernel(x):
        return _depthwise(x, weight, bias, numbers)
    return _grouped(function, x, weight, bias, options, groups)


@lru_cache(maxsize=1024)
def _taps_read(
    image: torch.Size, kernel: torch.Size, *options: tuple[Any, ...]
) -> tuple[tuple[slice, ...], tuple[int, ...]] | None:
    """The taps of a kernel that read pixels of such images, and their padding; None if all do.

    Of 3x3 taps around images of one pixel, eight read nothing but padding.
    """
    parts, pads = [], []
    for size, length, stride, pad, dilation in zip(image, kernel, *options):
        if isinstance(pad, str):
            return None
        outs = (size + 2 * pad - dilation * (length - 1) - 1) // stride + 1
        at = range(-pad, outs * stride - pad, stride)  # where the first tap reads
        read = [tap for tap in range(length) if any(0 <= first + dilation * tap < size for first in at)]
        if not read:
            return None
        part = slice(read[0], read[-1] + 1)
        pad -= dilation * part.start
        if pad < 0 or (size + 2 * pad - dilation * (part.stop - part.start - 1) - 1) // stride + 1 != outs:
            return None  # its sides would be padded unlike
        parts.append(part)
        pads.append(pad)
    whole = all(part == slice(0, length) for part, length in zip(parts, kernel))
    return None if whole else (tuple(parts), tuple(pads))


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    """Whether each channel with one or two spatial axes is convolved with one filter."""
    return weight.dim() < 6 and weight.shape[1] == groups and weight.shape[2] == 1


def _has_kernel(x: Tensor) -> bool:
    return can_run_on(x) and _needs_channels_last(x)


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """By our kernel, which takes all channels of all trials in one launch."""
    from plait.fusion.kernels.convolution.depthwise import depthwise_convolution  # needs Triton

    if x.dim() == 4:  # one spatial axis
        of_rows = {name: (least, *options[name]) for name, least in _OF_ONE_ROW}
        return _depthwise(x.unsqueeze(3), weight.unsqueeze(3), bias, of_rows).squeeze(3)
    geometry = (options[name] for name in ("stride", "padding", "dilation"))
    return depthwise_convolution(x, weight, bias, *geometry)


def _can_wait(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution can be computed together with an activation after it, and is worth it."""
    if not can_run_on(x) or not torch.is_grad_enabled() or x.numel() < _LEAST_ELEMENTS:
        return False
    from plait.fusion.kernels.convolution.trial_convolution import has_few_channels  # needs Triton

    return has_few_channels(weight)


def _pending(
    function: Function, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> PendingActivation:
    size = _size_after(x, weight.shape[3:], options)
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    x = x.to(kind)  # now, as autocast may not be enabled later
    like = like_of(torch.Size((*x.shape[:2], weight.shape[1], *size)), kind, x.device)
    compute = lambda slope: _gathered(function, x, weight, bias, options, slope)  # noqa: E731
    read = [part for part in (x, weight, bias) if part is not None]
    return PendingActivation(compute, None, [Watched(part, "convolved") for part in read], like, True)


def _needs_channels_last(x: Tensor) -> bool:
    """Whether `x` is on a GPU in 16 bits, where channels-last tensors are fastest for norms and pools.

    A way that is faster itself but returns another layout causes copies in later operations.
    """
    return x.is_cuda and x.dtype != torch.float64 and (torch.is_autocast_enabled("cuda") or x.dtype in HALF)


_RETURN_CHANNELS_LAST = ("gathered", "grouped channels_last")


@cache
def _fitting(function: Function, options: tuple[Any, ...], channels_last: bool) -> tuple[str, dict[str, Way]]:
    """The name of a convolution with these options, and the ways to compute it."""
    numbers = dict(options)
    return f"conv2d{sorted(options)}", {
        name: lambda x, weight, bias, way=way: way(function, x, weight, bias, numbers)
        for name, way in _WAYS.items()
        if not channels_last or name in _RETURN_CHANNELS_LAST
    }


def _each(value: Any, spatial: int) -> tuple[Any, ...]:
    """One number per axis, from one for all or one each; or `same` and `valid` for padding."""
    if value == "valid":
        return (0,) * spatial
    return tuple(value) * (spatial // len(value)) if isinstance(value, (tuple, list)) else (value,) * spatial


@lru_cache(maxsize=1024)
def _numbers(names: tuple[str, ...], values: tuple[Any, ...], kernel: torch.Size) -> tuple[Options, bool]:
    """The options of a convolution with a number for each axis, and whether it reads each pixel alone."""
    numbers: Options = {name: _each(value, len(kernel)) for name, value in zip(names, values)}
    numbers["padding"] = _padding(numbers, kernel)
    ones = {*kernel, *numbers["stride"]} == {1}
    return numbers, ones and all(pad == 0 for pad in numbers["padding"])


def _padding(numbers: Options, kernel: Sequence[int]) -> tuple[Any, ...]:
    """The padding of each axis as a number; `same` if its sides are unlike, or torch refuses its stride."""
    pads: tuple[Any, ...] = numbers["padding"]
    both_sides = [step * (size - 1) for step, size in zip(numbers["dilation"], kernel)]
    if "same" not in pads or set(numbers["stride"]) != {1} or any(total % 2 for total in both_sides):
        return pads
    return tuple(total // 2 for total in both_sides)


def _grouped(
    function: Function, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, groups: int = 1
) -> Tensor:
    """One convolution with the trials as groups."""
    count = weight.shape[0]
    flat_bias = None if bias is None else bias.reshape(-1)
    wide = function(fold_channels(x), weight.flatten(0, 1), flat_bias, groups=count * groups, **options)
    return unfold_channels(wide, count)


def _grouped_channels_last(
    function: Function, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """The grouped convolution in channels-last format, which is fastest on Tensor Cores."""
    count = weight.shape[0]
    layout = torch.channels_last
    folded = fold_channels(x).contiguous(memory_format=layout)
    kernel = weight.flatten(0, 1).contiguous(memory_format=layout)
    flat_bias = None if bias is None else bias.reshape(-1)
    return unfold_channels(function(folded, kernel, flat_bias, groups=count, **options), count)


def _one_by_one(
    function: Function, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """A convolution per trial, if grouped kernels are slower than separate launches."""
    biases: Sequence[Tensor | None] = [None] * x.shape[0] if bias is None else bias.unbind()
    return torch.stack([function(a, w, b, **options) for a, w, b in zip(x.unbind(), weight.unbind(), biases)])


def _unfolded(function: Function, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """By im2col: patches of all images are the rows of one batched product."""
    count, batch = x.shape[:2]
    kernel = weight.shape[3:]
    columns = F.unfold(
        x.flatten(0, 1),
        kernel,
        dilation=options["dilation"],
        padding=options["padding"],
        stride=options["stride"],
    )
    rows = columns.unflatten(0, (count, batch)).transpose(1, 2).flatten(2)
    out = (
        torch.bmm(weight.flatten(2), rows)
        if bias is None
        else torch.baddbmm(bias.unsqueeze(2), weight.flatten(2), rows)
    )
    return torch.unflatten(out, 2, (batch, *_size_after(x, kernel, options))).transpose(1, 2)


def _size_after(x: Tensor, kernel: torch.Size, options: Options) -> list[int]:
    """Height and width of the output of a convolution."""
    each = zip(x.shape[3:], kernel, options["padding"], options["dilation"], options["stride"])
    return [(size + 2 * pad - step * (taps - 1) - 1) // by + 1 for size, taps, pad, step, by in each]


def _gathered(
    function: Function,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    slope: float = 1.0,
) -> Tensor:
    """By our kernel, all trials in one launch; what is negative is multiplied by the `slope`."""
    stride = _stride_for_kernel(x, options)
    from plait.fusion.kernels.convolution.trial_convolution import trial_convolution  # needs Triton

    return trial_convolution(x, weight, bias, stride, options["padding"], None, slope)


def _stride_for_kernel(x: Tensor, options: Options) -> int:
    """The stride of both axes; raises RuntimeError for what our kernels do not support."""
    first, *others = set(options["stride"])
    if not can_run_on(x) or others or set(options["dilation"]) != {1}:
        raise RuntimeError("the kernel is for GPUs, equal strides and no dilation")
    return int(first)


_WAYS = {
    "gathered": _gathered,
    "grouped": _grouped,
    "grouped channels_last": _grouped_channels_last,
    "one by one": _one_by_one,
    "unfolded": _unfolded,
}


def _pointwise_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1x1 convolution as a dense layer on each pixel, channels last."""
    rows = x.movedim(2, -1)
    return batched_linear(rows, weight.flatten(2), bias).movedim(-1, 2)


def _pointwise_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1x1 convolution with pixels innermost: one small matrix product per image."""
    count, batch = x.shape[:2]
    columns = x.flatten(3)
    out = torch.matmul(weight.flatten(2).unsqueeze(1), columns)
    if bias is not None:
        out = out + bias[:, None, :, None]
    return out.view(count, batch, -1, *x.shape[3:])


def _pointwise_grouped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 4]
    return _grouped(function, x, weight, bias, {})


def _pointwise_gathered(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    options = {"stride": (1, 1), "dilation": (1, 1), "padding": (0, 0)}
    if x.dim() == 5:
        return _gathered(F.conv2d, x, weight, bias, options)
    return _gathered(F.conv2d, x.unsqueeze(3), weight.unsqueeze(3), bias, options).squeeze(3)


_POINTWISE = {
    "rows": _pointwise_rows,
    "columns": _pointwise_columns,
    "grouped": _pointwise_grouped,
}


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Transposed convolutions, whose weights have the input channels first."""
    given = arguments_of(_TRANSPOSED, _DEFAULTS, args, kwargs)
    x, weight = given["input"], given["weight"]
    trials = trials_of(x, weight)
    if not isinstance(weight, TrialTensor):
        return _with_one_weight(function, given, _TRANSPOSED)
    if x.dim() == weight.dim() - 1:
        return transposed(function, (x.unsqueeze(0), *args[1:]), kwargs).squeeze(0)
    options = {name: given[name] for name in ("stride", "padding", "output_padding", "dilation")}
    bias = None if given["bias"] is None else unwrap(given["bias"], trials)
    inner = unwrap(x, trials)
    numbers = {name: _each(options[name], weight.dim() - 2) for name in options}
    if given["groups"] == 1 and weight.dim() == 4 and inner.is_cuda:
        ways = {
            "gathered": lambda a, w, b: _gathered_up(a, w, b, numbers),
            "grouped channels_last": lambda a, w, b: _grouped_up(function, a, w, b, options, 1),
        }
        return wrap(choose(f"up{sorted(numbers.items())}", ways, inner, weight.stacked, bias), trials)
    return wrap(_grouped_up(function, inner, weight.stacked, bias, options, given["groups"]), trials)


def _grouped_up(
    function: Function, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, groups: int
) -> Tensor:
    """One transposed convolution with the trials as groups."""
    count = weight.shape[0]
    folded, kernel = fold_channels(x), weight.flatten(0, 1)
    if folded.is_cuda and folded.dim() == 4:
        folded = folded.contiguous(memory_format=torch.channels_last)
        kernel = kernel.contiguous(memory_format=torch.channels_last)
    flat_bias = None if bias is None else bias.reshape(-1)
    return unfold_channels(function(folded, kernel, flat_bias, groups=count * groups, **options), count)


def _gathered_up(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """By our kernel for transposed convolutions."""
    stride = _stride_for_kernel(x, options)
    from plait.fusion.kernels.convolution.trial_convolution import trial_convolution  # needs Triton

    pad = options["padding"]
    height, width = (
        (x.shape[3 + i] - 1) * options["stride"][i]
        - 2 * pad[i]
        + weight.shape[3 + i]
        + options["output_padding"][i]
        for i in range(2)
    )
    return trial_convolution(x, weight, bias, stride, pad, (height, width))
