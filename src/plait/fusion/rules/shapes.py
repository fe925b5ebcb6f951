"""Views, joins, splits and indexing; the trials axis stays first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.dispatch.fallback import loop, vmap_rule
from plait.fusion.dispatch.refusals import refuse_shared_target
from plait.fusion.dispatch.registry import RULES, Arguments, Function, Options, getter, rule
from plait.fusion.dispatch.tensor import TrialTensor, leaves, trials_of, unwrap, wrap
from plait.fusion.errors import FusionError, user_line
from plait.fusion.plain_function import PlainFunction
from plait.fusion.rules.elementwise import align_operand, link_copy
from plait.fusion.rules.reductions import shift, shift_all
from plait.fusion.speed.gpu_parts import copy_words, parts_of
from plait.fusion.speed.lazy_cast import PendingCast


def sizes(values: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of `x.view(2, 3)` or `x.view((2, 3))`."""
    first = values[0] if values else ()
    return tuple(first) if isinstance(first, (tuple, list, torch.Size)) else tuple(values)


@rule("reshape", "view")
def reshape(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    wanted = args[1:] or (kwargs.get("shape") or kwargs.get("size") or kwargs.get("dtype"),)
    if isinstance(wanted[0], torch.dtype):
        return TrialTensor(x.stacked.view(wanted[0]), x.trials)
    shape = sizes(wanted)
    if -1 in shape:
        rest = -math.prod(shape)
        shape = tuple(math.prod(x.shape) // rest if size == -1 else size for size in shape) if rest else shape
    if (seen := _cast_view(x, lambda source: source.reshape(x.trials.count, *shape))) is not None:
        return seen
    # A view may need a copy here, since the trials axis may be between the merged axes.
    return _reshaped(x, x.stacked.reshape(x.trials.count, *shape), surely=function.__name__ == "view")


def _cast_view(x: TrialTensor, view: Callable[[Tensor], Tensor]) -> TrialTensor | None:
    """A view of a tensor whose cast is not computed yet; None if it is no such tensor, or is copied."""
    seen = x.pending.seen_as(view) if isinstance(x.pending, PendingCast) else None
    if seen is None:
        return None
    x.is_passed_by = True
    return TrialTensor(seen.like, x.trials, seen)


def _reshaped(x: TrialTensor, outcome: Tensor, surely: bool) -> TrialTensor:
    made = TrialTensor(outcome, x.trials)
    link_copy(x, made, surely)
    return made


@rule("view_as", "reshape_as")
def reshape_as(function: Function, args: Arguments, kwargs: Options) -> Any:
    x, shape = args[0], tuple((args[1] if len(args) > 1 else kwargs["other"]).shape)
    if not isinstance(x, TrialTensor):
        return getattr(x, function.__name__.removesuffix("_as"))(shape)
    return x.view(shape) if function.__name__ == "view_as" else x.reshape(shape)


@rule("flatten")
def flatten(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    start = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    end = args[2] if len(args) > 2 else kwargs.get("end_dim", -1)
    if x.dim() == 0:
        return TrialTensor(x.stacked.unsqueeze(1), x.trials)
    if (seen := _cast_view(x, lambda source: source.flatten(shift(start), shift(end)))) is not None:
        return seen
    return _reshaped(x, x.stacked.flatten(shift(start), shift(end)), surely=False)


@rule("unflatten")
def unflatten(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    shape = args[2] if len(args) > 2 else kwargs["sizes"]
    return TrialTensor(x.stacked.unflatten(shift(dim), tuple(shape)), x.trials)


@rule("permute")
def permute(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    dims = sizes(args[1:] or (kwargs["dims"],))
    return _turned(x, x.stacked.permute(0, *(dim % x.dim() + 1 for dim in dims)))


def _turned(x: TrialTensor, outcome: Tensor) -> TrialTensor:
    made = TrialTensor(outcome, x.trials)
    made.permuted = True
    return made


@rule("transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
def transpose(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    moved = function(x.stacked, *map(shift_all, args[1:]), **{k: shift_all(v) for k, v in kwargs.items()})
    return _turned(x, moved)


@rule("t")
def swap_last(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    return x if x.dim() < 2 else _turned(x, x.stacked.transpose(-1, -2))


def reverse_axes(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    return x.permute(tuple(reversed(range(x.dim()))))


def conjugate_transpose(function: Function, args: Arguments, kwargs: Options) -> Any:
    return swap_last(function, args, kwargs).conj()


RULES[getter("H")] = RULES[getter("mH")] = conjugate_transpose
RULES[getter("T")] = reverse_axes
RULES[getter("mT")] = swap_last


@rule("unsqueeze")
def unsqueeze(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    return TrialTensor(x.stacked.unsqueeze(shift(dim)), x.trials)


@rule("squeeze")
def squeeze(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    axes = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    ones = [axis % x.dim() + 1 for axis in axes if x.dim() and x.shape[axis] == 1]
    return TrialTensor(x.stacked.squeeze(tuple(ones)) if ones else x.stacked, x.trials)


@rule("expand", "broadcast_to")
def expand(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    shape = sizes(args[1:] or (kwargs["size"],))
    return TrialTensor(align_operand(x, len(shape), x).expand(-1, *shape), x.trials)


@rule("expand_as")
def expand_as(function: Function, args: Arguments, kwargs: Options) -> Any:
    x, other = args
    trials = trials_of(args)
    return wrap(unwrap(x, trials), trials).expand(tuple(other.shape))


@rule("repeat", "tile")
def repeat(function: Function, args: Arguments, kwargs: Options) -> Any:
    x = args[0]
    times = sizes(args[1:] or tuple(kwargs.values()))
    if function.__name__ == "repeat" and len(times) < x.dim():  # torch says what is wrong
        return loop(function, args, kwargs)
    times = (1,) * (x.dim() - len(times)) + times
    return TrialTensor(align_operand(x, len(times), x).repeat(1, *times), x.trials)


@rule("cat", "concat", "concatenate", "stack")
def join(function: Function, args: Arguments, kwargs: Options) -> Any:
    """cat, stack and similar; shared tensors are expanded."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not tensors:
        return loop(function, args, kwargs)
    trials = trials_of(tensors)
    if function.__name__ != "stack":
        tensors = _without_bare_ones(tensors, dim)
    parts = [unwrap(tensor, trials) for tensor in tensors]
    if (
        dim in (1, 2 - parts[0].dim())
        and function.__name__ != "stack"
        and (order := _order_of(parts)) is not None
    ):
        return TrialTensor(_Joined.apply(order, *parts), trials)
    return wrap(function(parts, dim=shift(dim)), trials)


def _order_of(images: list[Tensor]) -> tuple[int, ...] | None:
    """In which order the axes of all these images lie in memory, if that is one of convolutions.

    The channels of several layers are joined in it, as the next layer would copy them otherwise. What is
    expanded, as features of a whole image to each of its pixels, is in any order.
    """
    if len({(x.dtype, x.shape[:2], x.shape[3:]) for x in images}) > 1:
        return None
    found = {_order_in_memory(x.shape, x.stride()) for x in images if not _is_expanded(x)}
    return found.pop() if len(found) == 1 else None


def _is_expanded(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))


@lru_cache(maxsize=4096)
def _order_in_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order in memory of the axes of images (trials, batch, channels, ...), if convolutions make it."""
    spatial = tuple(range(3, len(shape)))
    for order in ((1, *spatial, 0, 2), (1, 0, 2, *spatial)) if len(shape) in (4, 5) else ():
        step = 1
        for axis in reversed(order):
            if shape[axis] != 1 and strides[axis] != step:
                break
            step *= shape[axis]
        else:
            return order
    return None


class _Joined(PlainFunction):
    """Images with the channels of several, whose axes lie in memory in one order."""

    @staticmethod
    def forward(ctx: Any, order: tuple[int, ...], *images: Tensor) -> Tensor:
        ctx.channels = [each.shape[2] for each in images]
        trials, batch, _, *size = images[0].shape
        shape = [trials, batch, sum(ctx.channels), *size]
        like = images[0]
        # No view, as it may be written in place.
        made = torch.empty_permuted(shape, order, dtype=like.dtype, device=like.device)
        if any(map(_is_expanded, images)):
            places = made.permute(order).split(ctx.channels, order.index(2))
            for place, each in zip(places, images):
                copy_words(place, each.permute(order))
            return made
        # As matrices: of images with more than four axes torch copies them one by one.
        after = math.prod(shape[axis] for axis in order[order.index(2) + 1 :])
        rows = math.prod(shape[axis] for axis in order[: order.index(2)])
        widths = [channels * after for channels in (shape[2], *ctx.channels)]
        whole, *parts = (
            each.as_strided((rows, width), (width, 1)) for each, width in zip((made, *images), widths)
        )
        torch.cat(parts, 1, out=whole)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradient.split(ctx.channels, 2)


def _without_bare_ones(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """`tensors`; an empty 1-dim tensor, which torch.cat accepts, is reshaped like the others."""
    like = next((tensor for tensor in tensors if tuple(tensor.shape) != (0,)), None)
    if like is None or like.dim() == 1:
        return list(tensors)
    shape = list(like.shape)
    shape[dim] = 0
    return [tensor.reshape(shape) if tuple(tensor.shape) == (0,) else tensor for tensor in tensors]


@rule("split", "chunk", "tensor_split", "unbind", "narrow", "select", "flip", "roll", "split_with_sizes")
def cut(function: Function, args: Arguments, kwargs: Options) -> Any:
    """split, chunk and similar, along one axis."""
    x, name = args[0], function.__name__
    if not isinstance(x, TrialTensor):
        return vmap_rule(function, args, kwargs)
    if name == "flip":
        return TrialTensor(x.stacked.flip(shift_all(sizes(args[1:] or (kwargs["dims"],)))), x.trials)
    if name == "roll":
        return vmap_rule(function, args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k != "dim"}
    if name in ("unbind", "narrow", "select"):
        dim = shift(args[1] if len(args) > 1 else kwargs.get("dim", 0))
        if name != "unbind":
            return wrap(function(x.stacked, dim, *args[2:], **rest), x.trials)
        return wrap(parts_of(x.stacked, lambda whole: function(whole, dim, **rest)), x.trials)
    dim = shift(args[2] if len(args) > 2 else kwargs.get("dim", 0))
    if name == "tensor_split":  # its parts may be written in place
        return wrap(function(x.stacked, *args[1:2], dim=dim, **rest), x.trials)
    return wrap(parts_of(x.stacked, lambda whole: function(whole, *args[1:2], dim=dim, **rest)), x.trials)


@rule("gather")
def gather(function: Function, args: Arguments, kwargs: Options) -> Any:
    if len(args) != 3 or kwargs:
        return vmap_rule(function, args, kwargs)
    x, dim, index = args
    trials = trials_of(args)
    return wrap(torch.gather(unwrap(x, trials), shift(dim), unwrap(index, trials)), trials)


@rule("__getitem__")
def get_item(function: Function, args: Arguments, kwargs: Options) -> Any:
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, TrialTensor) or not _is_simple(index):
        return _indexed_by_trials(function, x, args[1])
    if (seen := _cast_view(x, lambda source: source[(slice(None), *index)])) is not None:
        return seen
    return TrialTensor(x.stacked[(slice(None), *index)], x.trials)


def _is_simple(index: tuple[Any, ...]) -> bool:
    """Whether an index has at most one tensor, so that the axes keep their order.

    Several index tensors that are not adjacent put their common axis first, before the trials.
    """
    plain = (int, slice, type(None), type(...), torch.SymInt)
    others = [part for part in index if isinstance(part, bool) or not isinstance(part, plain)]
    return len(others) < 2 and all(_is_one_index(part) for part in others)


def _is_one_index(part: Any) -> bool:
    if isinstance(part, list):
        return all(isinstance(number, int) and not isinstance(number, bool) for number in part)
    return isinstance(part, Tensor) and not isinstance(part, TrialTensor) and part.dim() > 0


def _indexed_by_trials(function: Function, x: Tensor, index: Any) -> Any:
    trials = trials_of(x, index)
    masks = [i for i in leaves(index) if isinstance(i, TrialTensor) and i.dtype in (torch.bool, torch.uint8)]
    if masks and trials.count > 1:
        raise FusionError(
            f"{user_line()}\n  selects elements by a mask, whose number may differ between trials; "
            f"use torch.where or masked_fill"
        )
    return (loop if masks else vmap_rule)(function, (x, index), {})


@rule("__setitem__")
def set_item(function: Function, args: Arguments, kwargs: Options) -> Any:
    x, index, value = args
    index = index if isinstance(index, tuple) else (index,)
    mask = index[0] if len(index) == 1 and isinstance(index[0], TrialTensor) else None
    if not isinstance(x, TrialTensor):
        refuse_shared_target(function, args)
    if (
        mask is not None
        and mask.dtype == torch.bool
        and (x.trials.count > 1 or not isinstance(value, Tensor))
    ):
        if isinstance(value, Tensor) and value.numel() > 1 and value.dim() > x.dim() - mask.dim():
            _refuse_many_values()
        # A list of values cannot be assigned by a mask that differs by trial; one value can.
        x.copy_(torch.where(_mask_like(mask, x), value, x))
        return None
    if not _is_simple(index):
        return loop(function, args, kwargs)
    target = x.stacked[(slice(None), *index)]
    new = align_operand(value, target.dim() - 1, x) if isinstance(value, TrialTensor) else value
    x.stacked[(slice(None), *index)] = new
    return None


def _refuse_many_values() -> None:
    raise FusionError(
        f"{user_line()}\n  writes one value per element of a mask, whose number may differ between trials; "
        f"use torch.where, or x[mask] = one number"
    )


def _mask_like(mask: TrialTensor, x: TrialTensor) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim()))


@rule("pad")
def pad(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Constant padding directly; for other modes trials are folded into the batch or the channels."""
    x = args[0] if args else kwargs["input"]
    rest = {k: v for k, v in kwargs.items() if k != "input"}
    mode = args[2] if len(args) > 2 else rest.get("mode", "constant")
    if mode == "constant" or x.dim() < 2:
        return TrialTensor(function(x.stacked, *args[1:], **rest), x.trials)
    padded = F.pad(x.stacked.flatten(0, 1), *args[1:], **rest)
    return TrialTensor(padded.unflatten(0, (x.trials.count, -1)), x.trials)
