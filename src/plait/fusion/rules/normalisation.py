"""Normalisation with statistics, weights and biases per trial."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.fusion.dispatch.batch_axis import require_rows_first
from plait.fusion.dispatch.fallback import loop, vmap_rule
from plait.fusion.dispatch.padding import masked_norm
from plait.fusion.dispatch.per_trial import PerTrial, one_each
from plait.fusion.dispatch.refusals import refuse_shared_target
from plait.fusion.dispatch.registry import Arguments, Function, Options, arguments_of, rule, takes_per_trial
from plait.fusion.dispatch.tensor import Trials, TrialTensor, trials_of, unwrap, wrap
from plait.fusion.errors import FusionError, user_line
from plait.fusion.kernels import HALF, Slope, can_run_on
from plait.fusion.kernels.images import in_memory
from plait.fusion.rules.convolution import fold_channels, unfold_channels
from plait.fusion.rules.elementwise import align_operand
from plait.fusion.speed.lazy_activation import PendingActivation
from plait.fusion.speed.lazy_reads import Watched
from plait.fusion.speed.lazy_rows import pending_row_norm

_TENSORS = ("running_mean", "running_var", "weight", "bias")
# Of norms of batches and of instances.
_DEFAULTS: Options = {
    **dict.fromkeys(_TENSORS),
    "training": False,
    "use_input_stats": True,
    "momentum": 0.1,
    "eps": 1e-5,
}


def _flat(value: Any, trials: Trials) -> Tensor | None:
    """One number per channel, with trials and channels in one axis; running statistics stay views."""
    if value is None:
        return None
    return unwrap(value, trials).reshape(-1)


def _has_own(*values: Any) -> bool:
    """Whether a weight or bias is that of each trial; otherwise trials are rows of one batch."""
    return any(isinstance(value, TrialTensor) for value in values)


def _can_write(given: Options) -> bool:
    """Whether running statistics are per trial and contiguous, so that they can be viewed as one axis."""
    statistics = [given[name] for name in ("running_mean", "running_var") if given[name] is not None]
    return all(isinstance(x, TrialTensor) and x.stacked.is_contiguous() for x in statistics)


@takes_per_trial
@rule("batch_norm")
def batch_norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input running_mean running_var weight bias training momentum eps"
    given = arguments_of(names, _DEFAULTS, args, kwargs)
    trials = trials_of(*given.values())
    inner = unwrap(given["input"], trials)
    if trials.rows is not None and given["training"]:
        require_rows_first("batch_norm", given["input"])
        return _padded_norm(inner, given, trials)
    writes = given["training"] and not _can_write(given)
    if given["training"] and isinstance(given["input"], TrialTensor):
        for name in ("running_mean", "running_var"):
            if isinstance(given[name], Tensor):
                refuse_shared_target(F.batch_norm, (given[name],))
    if writes or isinstance(given["momentum"], PerTrial) or isinstance(given["eps"], PerTrial):
        return loop(function, args, kwargs)
    if not given["training"] and not _has_own(*(given[name] for name in _TENSORS)):
        options = (given[name] for name in (*_TENSORS, "training", "momentum", "eps"))
        return wrap(F.batch_norm(inner.flatten(0, 1), *options).unflatten(0, inner.shape[:2]), trials)
    if given["training"] and _waits(inner, given):
        return TrialTensor(inner, trials, _pending(inner, given, trials))
    mean, variance, weight, bias = (_flat(given[name], trials) for name in _TENSORS)
    folded = fold_channels(inner)
    # Torch supports channels-last only for images, and would copy sequences.
    is_sequence = folded.dim() == 3 and folded.is_cuda and folded.stride(1) == 1
    x = folded.unsqueeze(2) if is_sequence else folded
    y = F.batch_norm(x, mean, variance, weight, bias, given["training"], given["momentum"], given["eps"])
    return wrap(unfold_channels(y.squeeze(2) if is_sequence else y, trials.count), trials)


def _padded_norm(inner: Tensor, given: Options, trials: Trials) -> Any:
    assert trials.rows is not None
    mean, variance, weight, bias = (
        None if given[name] is None else unwrap(given[name], trials) for name in _TENSORS
    )
    momentum, eps = (
        torch.tensor(one_each(name, given[name], trials.count), dtype=torch.float64, device=inner.device)
        for name in ("momentum", "eps")
    )
    return wrap(masked_norm(inner, trials.rows, mean, variance, weight, bias, momentum, eps), trials)


def _waits(inner: Tensor, given: Options) -> bool:
    """Whether our kernels compute the norm: on a GPU, in 16 bits, channels last."""
    if inner.dtype not in HALF or inner.dim() not in (4, 5) or not can_run_on(inner):
        return False
    trials, _, channels = inner.shape[:3]
    # Torch raises for one value per channel. Tensors of inference mode have no version counter.
    several = inner.numel() > trials * channels and not inner.is_inference()
    has_own = given["weight"] is not None and given["bias"] is not None
    return several and has_own and in_memory(inner).is_contiguous()


# Weights of norms of which a maximum was taken: the next time it is found together with the statistics.
_before_maxima: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _pending(inner: Tensor, given: Options, trials: Trials) -> PendingActivation:
    """Compute the statistics now, and the rest when the next operation is known."""
    from plait.fusion.kernels import batch_norm as kernels

    own = unwrap(given["weight"], trials)
    weight, bias = own.contiguous(), unwrap(given["bias"], trials).contiguous()
    mean, variance = given["running_mean"], given["running_var"]
    running = None if mean is None or variance is None else (mean.stacked, variance.stacked)
    is_line = inner.dim() == 4
    has_largest = is_line and own in _before_maxima
    known = kernels.statistics(inner, weight, bias, running, given["momentum"], given["eps"], has_largest)

    def norm(slope: Slope) -> Tensor:
        return kernels.trial_norm(inner, weight, bias, known, slope)

    def largest(slope: float) -> tuple[Tensor, Tensor]:
        _before_maxima[own] = True
        pair = kernels.trial_norm_largest(inner, weight, bias, known, slope)
        value, index = (part.unflatten(1, (trials.count, -1)).movedim(1, 0) for part in pair)
        return value, index

    sources = (Watched(inner, "normalized"),)
    names, grad = kernels.SMOOTH, torch.is_grad_enabled()
    return PendingActivation(norm, largest if is_line else None, sources, inner, grad, names)


@rule("instance_norm")
def instance_norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input running_mean running_var weight bias use_input_stats momentum eps"
    given = arguments_of(names, _DEFAULTS, args, kwargs)
    trials = trials_of(*given.values())
    if given["use_input_stats"] and not _can_write(given):
        return loop(function, args, kwargs)
    mean, variance, weight, bias = (_flat(given[name], trials) for name in _TENSORS)
    if trials.rows is not None and mean is not None and given["use_input_stats"]:
        raise FusionError(
            f"{user_line()}\n  averages instance norms over padding; give these trials batches of one size"
        )
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
    if not _has_own(given["weight"], given["bias"]):
        rows = given["input"].stacked
        normal = F.group_norm(
            rows.flatten(0, 1), given["num_groups"], given["weight"], given["bias"], given["eps"]
        )
        return wrap(normal.unflatten(0, rows.shape[:2]), trials)
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
    x = _of_trials(given["input"], trials)
    if not _has_own(given["weight"], given["bias"]):
        options = {name: given[name] for name in names.split()[1:]}
        return wrap(F.layer_norm(x.stacked, **options), trials)
    if (fast := _rows_norm(x, given, torch.is_autocast_enabled("cuda"))) is not None:
        return fast
    normal = F.layer_norm(x.stacked, given["normalized_shape"], eps=given["eps"])
    return wrap(_affine(normal, given["weight"], given["bias"], x), trials)


@rule("rms_norm")
def rms_norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input normalized_shape weight eps"
    given = arguments_of(names, {"weight": None, "eps": None}, args, kwargs)
    trials = trials_of(*given.values())
    x = _of_trials(given["input"], trials)
    if not _has_own(given["weight"]):
        return wrap(F.rms_norm(x.stacked, given["normalized_shape"], given["weight"], given["eps"]), trials)
    if (fast := _rows_norm(x, given, False)) is not None:
        return fast
    normal = F.rms_norm(x.stacked, given["normalized_shape"], eps=given["eps"])
    return wrap(_affine(normal, given["weight"], None, x), trials)


def _of_trials(x: Tensor, trials: Trials) -> TrialTensor:
    return x if isinstance(x, TrialTensor) else TrialTensor(unwrap(x, trials), trials)


def _rows_norm(x: TrialTensor, given: Options, widens: bool) -> TrialTensor | None:
    """A norm over the last axis by our kernels, in float32 if it `widens`; None if they do not support it."""
    if not can_run_on(x.stacked if x.pending is None else x.pending.like):
        return None
    own = [given.get(name) for name in ("weight", "bias")]
    parts = [None if part is None else part.stacked for part in own if part is None or _has_own(part)]
    wide = torch.float32 if widens else x.dtype
    kinds = {wide, *(part.dtype for part in parts if part is not None)}
    axis = tuple(given["normalized_shape"]) == x.shape[-1:]
    if len(parts) < 2 or not axis or torch.float64 in {x.dtype, *kinds}:
        return None
    from plait.fusion.kernels.sum_norm import MOST_CHANNELS, Norm, sum_norm  # needs Triton

    if len(kinds) > 1 or x.dim() < 2 or x.shape[-1] > MOST_CHANNELS:
        return None
    # Torch computes in float32, whatever x is.
    eps = torch.finfo(torch.float32).eps if given["eps"] is None else given["eps"]
    weight, bias = parts
    centred = "bias" in given
    pending = pending_row_norm(x, weight, bias, eps, centred) if widens else None
    if pending is not None:
        return TrialTensor(pending.like, x.trials, pending)
    # As alone, x may be written in place later if the norm is that of a cast.
    rows = x.stacked.reshape(x.trials.count, -1, x.shape[-1]).to(wide).contiguous()
    (y,) = sum_norm(rows, None, None, Norm(eps, centred, (wide,)), weight, bias)
    return TrialTensor(y.view(x.stacked.shape), x.trials)


def _affine(normal: Tensor, weight: Any, bias: Any, x: TrialTensor) -> Tensor:
    scale = align_operand(weight, x.dim(), x)
    if weight is None:
        return normal if bias is None else normal + align_operand(bias, x.dim(), x)
    return normal * scale if bias is None else torch.addcmul(align_operand(bias, x.dim(), x), normal, scale)
