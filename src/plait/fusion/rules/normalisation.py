"""Normalisation with each trial's own statistics, scales and shifts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.fallback import vmap_rule
from plait.fusion.registry import Arguments, Function, Options, arguments_of, rule
from plait.fusion.rules.convolution import fold_channels, unfold_channels
from plait.fusion.rules.elementwise import place
from plait.fusion.tensor import Trials, TrialTensor, trials_of, unwrap, wrap


def _flat(value: Any, trials: Trials) -> Tensor | None:
    """One number a channel, trials and channels in one axis; a view, so that statistics write through."""
    if value is None:
        return None
    return value.stacked.view(-1) if isinstance(value, TrialTensor) else unwrap(value, trials).reshape(-1)


@rule("batch_norm")
def batch_norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input running_mean running_var weight bias training momentum eps"
    defaults = dict.fromkeys(("running_mean", "running_var", "weight", "bias"))
    given = arguments_of(names, {**defaults, "training": False, "momentum": 0.1, "eps": 1e-5}, args, kwargs)
    trials = trials_of(*given.values())
    inner = unwrap(given["input"], trials)
    mean, variance, weight, bias = (_flat(given[name], trials) for name in defaults)
    folded = fold_channels(inner)
    # Torch sees channels that lie innermost only in images, and would copy sequences.
    is_sequence = folded.dim() == 3 and folded.is_cuda and folded.stride(1) == 1
    x = folded.unsqueeze(2) if is_sequence else folded
    y = F.batch_norm(x, mean, variance, weight, bias, given["training"], given["momentum"], given["eps"])
    return wrap(unfold_channels(y.squeeze(2) if is_sequence else y, trials.count), trials)


@rule("instance_norm")
def instance_norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input running_mean running_var weight bias use_input_stats momentum eps"
    defaults = dict.fromkeys(("running_mean", "running_var", "weight", "bias"))
    given = arguments_of(
        names, {**defaults, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5}, args, kwargs
    )
    trials = trials_of(*given.values())
    mean, variance, weight, bias = (_flat(given[name], trials) for name in defaults)
    folded = F.instance_norm(
        fold_channels(unwrap(given["input"], trials)),
        mean,
        variance,
        weight,
        bias,
        given["use_input_stats"],
        given["momentum"],
        given["eps"],
    )
    return wrap(unfold_channels(folded, trials.count), trials)


@rule("group_norm")
def group_norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input num_groups weight bias eps"
    given = arguments_of(names, {"weight": None, "bias": None, "eps": 1e-5}, args, kwargs)
    trials = trials_of(*given.values())
    if given["input"].dim() < 2:
        return vmap_rule(function, args, kwargs)
    folded = F.group_norm(
        fold_channels(unwrap(given["input"], trials)),
        given["num_groups"] * trials.count,
        _flat(given["weight"], trials),
        _flat(given["bias"], trials),
        given["eps"],
    )
    return wrap(unfold_channels(folded, trials.count), trials)


@rule("layer_norm")
def layer_norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input normalized_shape weight bias eps"
    given = arguments_of(names, {"weight": None, "bias": None, "eps": 1e-5}, args, kwargs)
    trials = trials_of(*given.values())
    x = wrap(unwrap(given["input"], trials), trials)
    normal = F.layer_norm(x.stacked, given["normalized_shape"], eps=given["eps"])
    return wrap(_affine(normal, given["weight"], given["bias"], x), trials)


@rule("rms_norm")
def rms_norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input normalized_shape weight eps"
    given = arguments_of(names, {"weight": None, "eps": None}, args, kwargs)
    trials = trials_of(*given.values())
    x = wrap(unwrap(given["input"], trials), trials)
    normal = F.rms_norm(x.stacked, given["normalized_shape"], eps=given["eps"])
    return wrap(_affine(normal, given["weight"], None, x), trials)


def _affine(normal: Tensor, weight: Any, bias: Any, x: TrialTensor) -> Tensor:
    scale = place(weight, x.dim(), x)
    if weight is None:
        return normal if bias is None else normal + place(bias, x.dim(), x)
    return normal * scale if bias is None else torch.addcmul(place(bias, x.dim(), x), normal, scale)
