"""Custom autograd functions that compute each row by itself: called once on the rows of all trials.

A function such as a product with quantized weights that all trials share gives the same for a batch of all
trials' rows, where a function that, for example, scales by the largest element does not. Both are called on
random rows at first, and only where the two agree, values and gradients, once is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plait.fusion.dispatch.fallback import draw_marks
from plait.fusion.dispatch.per_trial import PerTrial, of_trials
from plait.fusion.dispatch.tensor import TrialTensor, leaves

log = logging.getLogger(__name__)
# Whether a function on arguments like these computes rows by themselves.
_known: dict[Any, bool] = {}
# Products of other shapes are rounded otherwise.
_ROUNDING = 64


def rows_at(args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """The position of the only argument that differs between trials; None if there is no such one."""
    found = [index for index, value in enumerate(args) if isinstance(value, TrialTensor)]
    others = [leaf for i, value in enumerate(args) if [i] != found for leaf in leaves(value)]
    others += leaves(kwargs)
    if len(found) != 1 or any(isinstance(leaf, (TrialTensor, PerTrial)) for leaf in others):
        return None
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in others):
        return None
    rows = args[found[0]].stacked
    return found[0] if rows.dim() > 2 and rows.is_floating_point() and rows.numel() else None


def is_row_wise(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], at: int) -> bool:
    """Whether `function` gives the same for the rows of all trials as for those of each; tried once."""
    x = args[at].stacked
    if len(x) == 1:
        return False
    key = (getattr(function, "owner", function), tuple(map(_kind, leaves((args, kwargs)))))
    if key not in _known:
        if isinstance(x, FakeTensor) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        _known[key] = _agrees(function, args, kwargs, at)
        how = "once, on the rows of all trials" if _known[key] else "trial by trial"
        log.info("%s is computed %s", getattr(function, "__qualname__", function), how)
    return _known[key]


def _kind(value: Any) -> Any:
    """What may decide how a function computes."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    return value if isinstance(value, (int, float, str, type(None))) else type(value)


def _agrees(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], at: int) -> bool:
    x = args[at].stacked
    generator = torch.Generator().manual_seed(1)
    # Unlike sizes, so that what depends on other rows shows.
    sizes = of_trials(torch.arange(1.0, len(x) + 1), x)
    drawn = (torch.randn(x.shape, generator=generator) * sizes).to(x)
    before, state = draw_marks(), torch.get_rng_state()
    with torch.enable_grad():
        try:
            each = [_with_gradient(function, args, kwargs, at, rows) for rows in drawn]
            once = _with_gradient(function, args, kwargs, at, drawn.flatten(0, 1))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the user's code may expect rows of one trial
            return False
    if draw_marks() != before:
        torch.set_rng_state(state)
        return False
    if len({len(one) for one in (*each, once)}) > 1:
        return False
    pairs = [(torch.cat(parts), whole) for parts, whole in zip(zip(*each), once)]
    return all(a.shape == b.shape and _is_close(a, b) for a, b in pairs)


def _with_gradient(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], at: int, rows: Tensor
) -> list[Tensor]:
    """The results for some rows, and the gradient of the rows."""
    given = rows.detach().clone().requires_grad_()
    results = function(*(given if index == at else value for index, value in enumerate(args)), **kwargs)
    results = [results] if isinstance(results, Tensor) else list(results)
    trained = [result for result in results if result.requires_grad]
    weights = [torch.linspace(0.5, 1.5, y[0].numel()).to(y).view(y[0].shape).expand_as(y) for y in trained]
    gradients = torch.autograd.grad(trained, given, weights) if trained else ()
    return [result.detach() for result in (*results, *gradients)]


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not bool(one.isfinite().all()):
        return False
    error = torch.finfo(one.dtype).eps * _ROUNDING
    return bool(((one - other).abs().amax() <= error * one.abs().amax()).item())


def call_once(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], at: int) -> Any:
    """The results for the rows of all trials, by one call; a tensor or a tuple of tensors."""
    x = args[at]
    rows = x.stacked.flatten(0, 1)
    results = function(*(rows if index == at else value for index, value in enumerate(args)), **kwargs)
    apart = [
        TrialTensor(y.unflatten(0, x.stacked.shape[:2]), x.trials)
        for y in ((results,) if isinstance(results, Tensor) else results)
    ]
    return apart[0] if isinstance(results, Tensor) else tuple(apart)
