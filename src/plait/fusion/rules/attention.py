"""Attention: trials are folded into the batch, and one call computes all of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.batch_axis import require_rows_first
from plait.fusion.dispatch.fallback import vmap_rule
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.registry import Arguments, Function, Options, arguments_of, rule, takes_per_trial
from plait.fusion.dispatch.tensor import Trials, TrialTensor, trials_of, unwrap, wrap
from plait.fusion.kernels import can_run_on
from plait.fusion.rules.dropout import drop
from plait.fusion.rules.elementwise import align_operand

_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa"
_DEFAULTS: Options = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def given_to_attention(args: Arguments, kwargs: Options) -> Options:
    """The arguments of a call of torch's function, by name."""
    return arguments_of(_NAMES, _DEFAULTS, args, kwargs)


@takes_per_trial
@rule("scaled_dot_product_attention")
def attention(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Scaled dot product attention; dropout materializes the weights, as each trial drops its own."""
    given = given_to_attention(args, kwargs)
    parts = [given[name] for name in ("query", "key", "value")]
    trials = trials_of(parts, given["attn_mask"])
    dims = parts[0].dim()
    same = all(part.shape[:-2] == parts[0].shape[:-2] for part in parts)
    drops = isinstance(given["dropout_p"], PerTrial) or given["dropout_p"] > 0
    if dims not in (3, 4) or (drops and given["enable_gqa"]) or not (same or given["enable_gqa"]):
        return vmap_rule(function, args, kwargs)
    query, key, value = (unwrap(part, trials) for part in parts)
    mask = _mask(given["attn_mask"], dims)
    if drops:
        require_rows_first("dropout of attention", parts)
        return wrap(_with_dropout(query, key, value, mask, given, trials), trials)
    options = {name: given[name] for name in ("is_causal", "scale", "enable_gqa")}
    if dims == 3:
        return wrap(function(query, key, value, mask, **options), trials)
    rows = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    folded = _short(*rows, options) if mask is None else None
    if folded is None:
        folded = function(*rows, None if mask is None else _fold_mask(mask, query), **options)
    return wrap(folded.unflatten(0, query.shape[:2]), trials)


def _short(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor | None:
    """Attention within short sequences by our kernel; None if it does not support these."""
    if not can_run_on(query):
        return None
    from plait.fusion.kernels.short_attention import short_attention, supports  # needs Triton

    if not supports(query, key, value):
        return None
    return short_attention(query, key, value, options["scale"], options["is_causal"])


def _mask(mask: Any, dims: int) -> Tensor | None:
    """The mask with all axes, of shape (trials or 1, batch or 1, ..., query length, key length)."""
    if mask is None:
        return None
    if isinstance(mask, TrialTensor):
        full: Tensor = align_operand(mask, dims, mask)
        return full
    shared: Tensor = mask.view(*(1,) * (dims + 1 - mask.dim()), *mask.shape)
    return shared


def _fold_mask(mask: Tensor, query: Tensor) -> Tensor:
    if mask.shape[:2] == (1, 1):
        return mask.squeeze(0)
    return mask.expand(*query.shape[:2], *mask.shape[2:]).flatten(0, 1)


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: Options, trials: Trials
) -> Tensor:
    check_one_mask(given)
    scale = given["scale"] if given["scale"] is not None else 1.0 / math.sqrt(query.shape[-1])
    scores = (query * scale) @ key.mT
    if given["is_causal"]:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(ones.triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = drop(safe_softmax(scores), given["dropout_p"], trials)
    return weights.to(value.dtype) @ value


def check_one_mask(given: Options) -> None:
    """Raise what torch does for a causal mask besides another one."""
    if given["is_causal"] and given["attn_mask"] is not None:
        raise RuntimeError("scaled_dot_product_attention: found attn_mask and is_causal=True, expected one")


def safe_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis; zeros for fully masked rows, as in torch's attention."""
    masked = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)
