"""Losses of torch.nn: one value per trial, with label smoothing per trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.dispatch.batch_axis import require_rows_first
from plait.fusion.dispatch.fallback import descend, find_rule, loop, vmap_rule
from plait.fusion.dispatch.per_trial import PerTrial, of_trials, on_device
from plait.fusion.dispatch.registry import (
    PER_TRIAL_RULES,
    RULES,
    Arguments,
    Function,
    Options,
    Rule,
    arguments_of,
    rule,
    takes_per_trial,
)
from plait.fusion.dispatch.tensor import Trials, TrialTensor, trials_of, unwrap, wrap
from plait.fusion.errors import FusionError
from plait.fusion.kernels import can_run_on
from plait.fusion.rules.hooks import differentiated
from plait.fusion.speed.lazy_cast import PendingCast

# Elementwise losses of two tensors, which differ only in the formula.
_ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
)


def elementwise_loss(function: Function, args: Arguments, kwargs: Options) -> Any:
    """The mean or sum of an elementwise loss over each trial's elements."""
    given = {**dict(zip(("input", "target"), args)), **kwargs}
    if len(args) > 2 or _has_old_options(kwargs):
        return descend(function, args, kwargs)
    trials = trials_of(given)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    dims = {tensor.dim() for tensor in tensors.values()}
    if len(dims) > 1 or given["input"].shape != given["target"].shape:
        return descend(function, args, kwargs)
    placed = {name: unwrap(tensor, trials) for name, tensor in tensors.items()}
    rest = {k: v for k, v in given.items() if k not in tensors and k != "reduction"}
    each = function(**placed, **rest, reduction="none")
    return wrap(_reduce(each, given.get("reduction", "mean")), trials)


def _has_old_options(given: Options) -> bool:
    """Whether options are given that torch had before `reduction`."""
    return given.get("size_average") is not None or given.get("reduce") is not None


def _reduce(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    flat = each.reshape(each.shape[0], -1)
    return flat.mean(1) if reduction == "mean" else flat.sum(1)


@takes_per_trial
@rule("cross_entropy")
def cross_entropy(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Cross entropy with class indices; with class probabilities torch's function is run per trial."""
    names = "input target weight size_average ignore_index reduce reduction label_smoothing"
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    given = arguments_of(names, defaults, args, kwargs)
    logits, target = given["input"], given["target"]
    _check_targets("cross_entropy", logits, target)
    if target.is_floating_point() or _has_old_options(given):
        rows = trials_of(logits, target).rows
        require_rows_first("cross_entropy", logits, target)
        return (
            vmap_rule(F.cross_entropy, args, kwargs) if rows is None else loop(function, args, kwargs, rows)
        )
    trials = trials_of(logits, target)
    if trials.rows is not None:
        require_rows_first("cross_entropy", logits, target)
        target = _without_padding(target, given["ignore_index"], trials)
    plain = given["weight"] is None and not isinstance(given["label_smoothing"], PerTrial)
    if plain and given["label_smoothing"] == 0 and logits.dim() == 2:
        return wrap(_plain_cross_entropy(_uncast(logits, trials), unwrap(target, trials), given), trials)
    log_chance = F.log_softmax(unwrap(logits, trials), 1 if logits.dim() == 1 else 2)
    options = {name: given[name] for name in ("weight", "ignore_index", "reduction")}
    smoothing = given["label_smoothing"]
    return wrap(_negative_log(log_chance, unwrap(target, trials), smoothing=smoothing, **options), trials)


def _check_targets(name: str, outputs: Tensor, targets: Tensor) -> None:
    """Raise for targets whose number differs from the rows of the outputs."""
    outputs_shape, found_shape = tuple(outputs.shape), tuple(targets.shape)
    # Class indices have the shape of the outputs without the class axis, which is the second axis of a batch.
    indices_shape = (*outputs_shape[: min(1, len(outputs_shape) - 1)], *outputs_shape[2:])
    are_indices = not targets.is_floating_point()
    takes_probabilities = name == "cross_entropy"
    if found_shape == indices_shape and are_indices:
        return
    if found_shape != outputs_shape or are_indices or not takes_probabilities:
        kind = "class indices" if are_indices else "probabilities"
        other = f" or probabilities of shape {outputs_shape}" if takes_probabilities else ""
        raise FusionError(
            f"{name}: found outputs of shape {outputs_shape} and {kind} of shape {found_shape} in each "
            f"trial, expected integer class indices of shape {indices_shape}{other}"
        )


def _without_padding(target: Any, ignored: int, trials: Trials) -> Any:
    """Class indices with those of padding rows replaced by `ignored`."""
    assert trials.rows is not None
    inner = unwrap(target, trials)
    real = trials.rows.mask(inner.shape[1], inner.device)
    return wrap(inner.masked_fill(~real.view(*real.shape, *(1,) * (inner.dim() - 2)), ignored), trials)


def _uncast(logits: Tensor, trials: Trials) -> tuple[Tensor, torch.dtype]:
    """Logits in the precision in which they are in memory, and that of their loss."""
    pending = logits.pending if isinstance(logits, TrialTensor) else None
    if isinstance(pending, PendingCast):
        logits.is_passed_by = True  # type: ignore[attr-defined]
        return pending.uncast(), pending.like.dtype
    plain = unwrap(logits, trials)
    return plain, plain.dtype


def _plain_cross_entropy(logits_tbc: tuple[Tensor, torch.dtype], target_tb: Tensor, given: Options) -> Tensor:
    """The common case: rows of all trials in one call, then a sum per trial."""
    ignored, reduction = given["ignore_index"], given["reduction"]
    rows, targets = logits_tbc[0].flatten(0, 1), target_tb.flatten()
    if reduction not in ("none", "mean", "sum"):  # torch's function says what is wrong
        F.cross_entropy(rows, targets, reduction=reduction)
    if can_run_on(rows) and rows.dtype != torch.float64 and targets.dtype == torch.int64:
        from plait.fusion.kernels.cross_entropy import row_losses  # needs Triton

        # Under autocast torch's function returns float32, too.
        losses = row_losses(rows, targets, ignored)
        each = losses if torch.is_autocast_enabled("cuda") else losses.to(logits_tbc[1])
    else:
        each = F.cross_entropy(rows, targets, ignore_index=ignored, reduction="none")
    each = each.view(target_tb.shape)
    if reduction == "none":
        return each
    total = each.sum(1)
    return total if reduction == "sum" else total / (target_tb != ignored).sum(1)


@rule("nll_loss")
def nll_loss(function: Function, args: Arguments, kwargs: Options) -> Any:
    names = "input target weight size_average ignore_index reduce reduction"
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean"}
    given = arguments_of(names, defaults, args, kwargs)
    if _has_old_options(given):
        return loop(function, args, kwargs)
    _check_targets("nll_loss", given["input"], given["target"])
    trials = trials_of(given["input"], given["target"])
    options = {name: given[name] for name in defaults}
    log_chance, target = unwrap(given["input"], trials), unwrap(given["target"], trials)
    return wrap(_negative_log(log_chance, target, smoothing=0.0, **options), trials)


def _negative_log(
    log_chance: Tensor, target: Tensor, weight: Any, ignore_index: int, reduction: str, smoothing: float
) -> Tensor:
    """Negative log likelihood with smoothing and class weights as in torch, reduced per trial."""
    count = log_chance.shape[0]
    axis = 1 if log_chance.dim() == 2 else 2
    classes = log_chance.shape[axis]
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0)
    picked = -log_chance.gather(axis, index.unsqueeze(axis)).squeeze(axis)
    scale = _class_weights(weight, count, index, log_chance.dtype)
    picked = picked if scale is None else picked * scale
    loss = picked
    if isinstance(smoothing, PerTrial) or smoothing > 0:
        share = _per_trial_number(smoothing, picked)
        spread = log_chance if weight is None else log_chance * _along(weight, log_chance, axis)
        loss = (1 - share) * picked - share / classes * spread.sum(axis)
    loss = loss.masked_fill(ignored, 0.0)
    if reduction == "none":
        return loss
    total = loss.reshape(count, -1).sum(1)
    if reduction == "sum":
        return total
    counted = torch.ones_like(loss) if scale is None else scale
    return total / counted.masked_fill(ignored, 0.0).reshape(count, -1).sum(1)


def _class_weights(weight: Any, count: int, index: Tensor, kind: torch.dtype) -> Tensor | None:
    if weight is None:
        return None
    inner = weight.stacked if isinstance(weight, TrialTensor) else weight.expand(count, -1)
    return inner.gather(1, index.reshape(count, -1)).view(index.shape).to(kind)


def _along(weight: Any, like: Tensor, axis: int) -> Tensor:
    inner: Tensor = weight.stacked if isinstance(weight, TrialTensor) else weight.unsqueeze(0)
    shape = [inner.shape[0]] + [1] * (like.dim() - 1)
    shape[axis] = -1
    return inner.view(shape)


def _per_trial_number(value: float, like: Tensor) -> Any:
    if not isinstance(value, PerTrial):
        return value
    return of_trials(on_device(value.values, like.dtype, like.device), like)


for _name in _ELEMENTWISE.split():
    RULES[getattr(F, _name)] = elementwise_loss


@rule("backward")
def backward(function: Function, args: Arguments, kwargs: Options) -> Any:
    """backward() of each trial's loss, computed from their sum, since trials are independent."""
    loss = args[0]
    gradient = kwargs.pop("gradient", args[1] if len(args) > 1 else None)
    inner = torch.ones_like(loss.stacked) if gradient is None else unwrap(gradient, loss.trials)
    if (inputs := kwargs.get("inputs")) is not None:
        every = inputs if isinstance(inputs, (tuple, list)) else [inputs]
        kwargs["inputs"] = [x.stacked if isinstance(x, TrialTensor) else x for x in every]
    loss.stacked.backward(inner, **kwargs)


def gradients(function: Function, args: Arguments, kwargs: Options) -> Any:
    """torch.autograd.grad inside a model or a step, for all trials."""
    given = arguments_of("outputs inputs grad_outputs", {"grad_outputs": None}, args, kwargs)
    trials = trials_of(given)
    outputs, inputs, starts = (
        tuple(value) if isinstance(value, (tuple, list)) else (value,)
        for value in (given["outputs"], given["inputs"], given["grad_outputs"])
    )
    starts = starts if len(starts) == len(outputs) else (None,) * len(outputs)
    outers = [unwrap(output, trials) for output in outputs]
    ones = [
        torch.ones_like(outer) if start is None else unwrap(start, trials).contiguous()
        for outer, start in zip(outers, starts)
    ]
    rest = {k: v for k, v in given.items() if k not in ("outputs", "inputs", "grad_outputs")}
    grads = torch.autograd.grad(outers, [differentiated(x, trials) for x in inputs], ones, **rest)
    return tuple(None if gradient is None else wrap(gradient, trials) for gradient in grads)


RULES[torch.autograd.grad] = gradients
# It checks in Python for negative variances.
RULES[F.gaussian_nll_loss] = loop


def _find_rows(values: Sequence[Any]) -> None:
    """Take the first axis of new tensors, such as random targets, for the rows that outputs have."""
    ours = [value for value in values if isinstance(value, TrialTensor)]
    shapes = {value.shape for value in ours if value.rows_at == 0}
    for value in ours:
        if value.rows_at is None and value.shape in shapes:
            value.rows_at = 0


def _over_own_rows(usual: Rule) -> Rule:
    """`usual`; with padded batches the loss trial by trial, each without padding rows."""

    def loss(function: Function, args: Arguments, kwargs: Options) -> Any:
        rows = trials_of(args, kwargs).rows
        if rows is None:
            return usual(function, args, kwargs)
        require_rows_first(function.__name__, args, kwargs)
        _find_rows([*args[:2], kwargs.get("input"), kwargs.get("target")])
        return loop(function, args, kwargs, rows)

    return takes_per_trial(loss) if usual in PER_TRIAL_RULES else loss


for _function in vars(F).values():
    _name = getattr(_function, "__name__", "")
    if (_name.endswith("_loss") or _name in ("kl_div", *_ELEMENTWISE.split())) and callable(_function):
        RULES[_function] = _over_own_rows(RULES.get(_function, find_rule(_function)))
