"""Functions along axes of one tensor: the axes shift by one behind the trials."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.fallback import vmap_rule
from plait.fusion.registry import RULES, Arguments, Function, Options, rule, spellings
from plait.fusion.tensor import TrialTensor, wrap

# Functions whose second argument is one axis, which they need.
_ALONG = "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin glu argsort logsumexp"
# Functions that reduce all axes where none is given, and take several at once.
_REDUCE = "sum mean nansum nanmean amax amin var std count_nonzero any all"
# Functions that reduce all axes where none is given, and take one at most.
_REDUCE_ONE = "max min argmax argmin prod median nanmedian"


def shift(axis: int) -> int:
    """Where a lone tensor's axis lies behind the trials axis."""
    return axis + 1 if axis >= 0 else axis


def shift_all(axes: Any) -> Any:
    return shift(axes) if isinstance(axes, int) else tuple(shift(axis) for axis in axes)


def along(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A function along given axes that keeps or drops them."""
    x = args[0] if args else kwargs.pop("input")
    if not isinstance(x, TrialTensor) or x.dim() == 0:
        return vmap_rule(function, args or (x,), kwargs)
    others = list(args[1:])
    for name in ("dim", "dims"):
        if kwargs.get(name) is not None:
            kwargs = {**kwargs, name: shift_all(kwargs[name])}
    if others:
        others[0] = shift_all(others[0])
    elif "dim" not in kwargs and "dims" not in kwargs:
        return vmap_rule(function, args, kwargs)
    return wrap(function(x.stacked, *others, **kwargs), x.trials)


def reduce(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A sum or its kind, over the given axes or over all of a trial's."""
    x = args[0] if args else kwargs["input"]
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if not isinstance(x, TrialTensor) or x.dim() == 0 or isinstance(dim, bool):
        return vmap_rule(function, args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "dim", "axis")}
    axes = tuple(range(1, x.stacked.dim())) if dim is None or dim == () else shift_all(dim)
    return wrap(function(x.stacked, axes, *args[2:], **rest), x.trials)


def reduce_one(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A maximum or its kind, along one axis or over all of a trial's."""
    x = args[0] if args else kwargs["input"]
    second = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("other"))
    if isinstance(second, Tensor):
        elementwise = torch.maximum if function.__name__ == "max" else torch.minimum
        return elementwise(x, second)
    if not isinstance(x, TrialTensor) or x.dim() == 0:
        return vmap_rule(function, args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "dim")}
    if function.__name__ == "max" and second in (-1, x.dim() - 1) and _joins(x, args[2:], rest):
        assert x.pending is not None
        return torch.return_types.max(wrap(x.pending.maximum(), x.trials))
    if second is not None:
        return wrap(function(x.stacked, shift(second), *args[2:], **rest), x.trials)
    outcome = function(x.stacked.flatten(1), 1, **rest)
    # Along an axis torch returns the places too; over all axes, the value alone.
    return wrap(outcome if isinstance(outcome, Tensor) else outcome[0], x.trials)


def _joins(x: TrialTensor, args: Arguments, kwargs: Options) -> bool:
    """Whether a maximum can be computed together with the batch norm before it."""
    return x.pending is not None and x.pending.largest is not None and not args and not kwargs


@rule("norm", "vector_norm")
def norm(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Vector norms per trial; the rarer matrix norms go through vmap."""
    x, order = args[0], (args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2)))
    if not isinstance(x, TrialTensor) or not isinstance(order, (int, float)) or len(args) > 3:
        return vmap_rule(function, args, kwargs)
    if set(kwargs) - {"p", "ord", "dim", "keepdim"}:
        return vmap_rule(function, args, kwargs)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    axes = tuple(range(1, x.stacked.dim())) if dim is None else shift_all(dim)
    keepdim = kwargs.get("keepdim", False)
    return wrap(torch.linalg.vector_norm(x.stacked, order, axes, keepdim), x.trials)


@rule("topk", "sort")
def ordered(function: Function, args: Arguments, kwargs: Options) -> Any:
    """The largest, or all, in order along one axis."""
    x, position = args[0], 1 if function.__name__ == "sort" else 2
    dim = args[position] if len(args) > position else kwargs.get("dim", -1)
    if not isinstance(x, TrialTensor) or isinstance(dim, bool) or "stable" in kwargs:
        return vmap_rule(function, args, kwargs)
    before, after = args[1:position], args[position + 1 :]
    rest = {k: v for k, v in kwargs.items() if k != "dim"}
    return wrap(function(x.stacked, *before, shift(dim), *after, **rest), x.trials)


for _spelling in spellings(_ALONG.split()):
    RULES[_spelling] = along
for _spelling in spellings(_REDUCE.split()):
    RULES[_spelling] = reduce
for _spelling in spellings(_REDUCE_ONE.split()):
    RULES[_spelling] = reduce_one
