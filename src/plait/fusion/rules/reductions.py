"""Functions along axes of one tensor: axes are shifted by one for the trials axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.fallback import loop, vmap_rule
from plait.fusion.dispatch.registry import Arguments, Function, Options, arguments_of, rule
from plait.fusion.dispatch.tensor import TrialTensor, wrap
from plait.fusion.speed.lazy_activation import PendingActivation

# Functions whose second argument is one axis, which is required.
_ALONG = "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin glu argsort logsumexp"
# Functions that reduce all axes by default, and accept several.
_REDUCE = "sum mean nansum nanmean amax amin var std count_nonzero any all"
# Functions that reduce all axes by default, and accept at most one.
_REDUCE_ONE = "max min argmax argmin prod median nanmedian"


def shift(axis: int) -> int:
    """The index of a trial's axis in the stacked tensor."""
    return axis + 1 if axis >= 0 else axis


def shift_all(axes: Any) -> Any:
    return shift(axes) if isinstance(axes, int) else tuple(shift(axis) for axis in axes)


@rule(*_ALONG.split())
def along(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A function along given axes that keeps or drops them."""
    x, others = args[0], list(args[1:])
    if not isinstance(x, TrialTensor) or x.dim() == 0:
        return vmap_rule(function, args, kwargs)
    named = next((name for name in ("dim", "dims") if name in kwargs), None)
    axes = others[0] if others else None if named is None else kwargs[named]
    if axes is None:
        # Torch's default axis depends on the number of axes, which must not include the trials.
        return loop(function, args, kwargs)
    if not _are_axes(axes) or (not isinstance(axes, int) and not axes):
        return loop(function, args, kwargs)
    if others:
        others[0] = shift_all(axes)
    else:
        assert named is not None
        kwargs = {**kwargs, named: shift_all(axes)}
    return wrap(function(x.stacked, *others, **kwargs), x.trials)


def _are_axes(axes: Any) -> bool:
    """Whether `axes` is an int or several, and not a bool or dtype of another signature."""
    several = axes if isinstance(axes, (tuple, list)) else (axes,)
    return all(isinstance(axis, int) and not isinstance(axis, bool) for axis in several)


@rule(*_REDUCE.split())
def reduce(function: Function, args: Arguments, kwargs: Options) -> Any:
    """sum and similar, over the given axes or over all axes of a trial."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    everything = dim is None or (isinstance(dim, (tuple, list)) and not dim)
    if not isinstance(x, TrialTensor) or x.dim() == 0 or not (everything or _are_axes(dim)):
        return vmap_rule(function, args, kwargs)
    if dim is not None and everything and function.__name__ in ("any", "all"):  # of no axes
        return loop(function, args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k != "dim"}
    axes = tuple(range(1, x.stacked.dim())) if everything else shift_all(dim)
    return wrap(function(x.stacked, axes, *args[2:], **rest), x.trials)


@rule(*_REDUCE_ONE.split())
def reduce_one(function: Function, args: Arguments, kwargs: Options) -> Any:
    """max and similar, along one axis or over all axes of a trial."""
    x, name = args[0], function.__name__
    second = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("other"))
    if isinstance(second, Tensor):
        elementwise = torch.maximum if name == "max" else torch.minimum
        return elementwise(x, second)
    if not isinstance(x, TrialTensor) or x.dim() == 0:
        return vmap_rule(function, args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k != "dim"}
    if name == "max" and second in (-1, x.dim() - 1) and _joins(x, args[2:], rest):
        assert isinstance(x.pending, PendingActivation)
        x.is_passed_by = True
        return torch.return_types.max(wrap(x.pending.maximum(), x.trials))
    if second is not None:
        if not _are_axes(second):
            return loop(function, args, kwargs)
        return wrap(function(x.stacked, shift(second), *args[2:], **rest), x.trials)
    if name in ("max", "min"):
        # Over all elements, ties share the gradient; along an axis, one element gets all of it.
        return wrap((torch.amax if name == "max" else torch.amin)(x.stacked.flatten(1), 1), x.trials)
    if name in ("median", "nanmedian") or rest.get("keepdim") or any(args[2:]):
        return loop(function, args, kwargs)
    return wrap(function(x.stacked.flatten(1), 1, **rest), x.trials)


def _joins(x: TrialTensor, args: Arguments, kwargs: Options) -> bool:
    """Whether a maximum can be fused with a pending batch norm."""
    pending = x.pending if isinstance(x.pending, PendingActivation) else None
    return pending is not None and pending.largest is not None and not args and not kwargs


@rule("norm")
def norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Vector norms per trial; matrix norms use vmap."""
    x, order = args[0], (args[1] if len(args) > 1 else kwargs.get("p", 2))
    if not isinstance(x, TrialTensor) or not isinstance(order, (int, float)) or len(args) > 3:
        return vmap_rule(function, args, kwargs)
    if set(kwargs) - {"p", "dim", "keepdim"} or x.dim() == 0:
        return vmap_rule(function, args, kwargs)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    axes = tuple(range(1, x.stacked.dim())) if dim is None or dim in ((), []) else shift_all(dim)
    keepdim = kwargs.get("keepdim", False)
    return wrap(torch.linalg.vector_norm(x.stacked, order, axes, keepdim), x.trials)


@rule("topk", "sort")
def ordered(function: Function, args: Arguments, kwargs: Options) -> Any:
    """topk, sort and similar, along one axis."""
    names = "input k dim largest sorted" if function.__name__ == "topk" else "input dim descending"
    given = arguments_of(names, {"dim": -1}, args, kwargs)
    x, dim = given.pop("input"), given.pop("dim")
    if not isinstance(x, TrialTensor) or not _are_axes(dim) or x.dim() == 0 or "stable" in kwargs:
        return loop(function, args, kwargs)
    return wrap(function(x.stacked, dim=shift(dim), **given), x.trials)
