"""Tracks the batch axis of trial tensors while batches are padded.

Functions that mix rows must ignore padding, and expect the batch on the first axis. A model may move it: in a
time-major model it is the second axis. So each trial tensor records its batch axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.fusion.dispatch.registry import Arguments, Function, Options
from plait.fusion.dispatch.tensor import TrialTensor, leaves
from plait.fusion.errors import FusionError, user_line

# Rows share an axis with something else and are not outermost, or their axis is unknown.
MIXED = -1

_MOVES = ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "unsqueeze", "__get__")
_RESHAPES = ("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten")


def follow(function: Function, args: Arguments, kwargs: Options, outcome: Any) -> None:
    """Record the batch axis of the result of `function`."""
    given = [x for x in leaves((args, kwargs)) if isinstance(x, TrialTensor) and x.rows_at is not None]
    if not given or given[0].trials.rows is None:
        return
    source = next((x for x in given if x.rows_at), given[0])
    for made in leaves(outcome):
        if isinstance(made, TrialTensor) and made.rows_at is None:
            made.rows_at = _rows_after(function, args, kwargs, source, tuple(made.shape))


def _rows_after(
    function: Function, args: Arguments, kwargs: Options, source: TrialTensor, shape: tuple[int, ...]
) -> int | None:
    at, rows, name = source.rows_at, source.trials.rows, getattr(function, "__name__", "")
    assert at is not None
    assert rows is not None
    if at == MIXED or not shape:
        return MIXED if shape and any(size % rows.length == 0 for size in shape) else None
    if name in _MOVES and source is args[0]:
        return _moved(function, args, kwargs, at)
    if name in ("stack", "hstack", "dstack"):
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return at + 1 if name == "stack" and dim % len(shape) <= at else at
    if name in _RESHAPES:
        return _reshaped(tuple(source.shape), at, shape, rows.length)
    if name == "__getitem__" and source is args[0]:
        axis = _indexed(args[1], at, tuple(source.shape))
        if axis is not None:
            return axis
    return _aligned(tuple(source.shape), at, shape, rows.length)


def _moved(function: Function, args: Arguments, kwargs: Options, at: int) -> int:
    """The axis after the same permutation of a meta tensor whose sizes identify its axes."""
    sizes = [axis + 2 for axis in range(args[0].dim())]
    moved = function(torch.empty(sizes, device="meta"), *args[1:], **kwargs)
    return list(moved.shape).index(at + 2)


def _reshaped(before: Sequence[int], at: int, after: Sequence[int], length: int) -> int:
    """The axis after a reshape, if the rows are outermost in it."""
    outer = math.prod(before[:at])
    for axis in range(len(after)):
        if math.prod(after[:axis]) == outer and after[axis] % length == 0:
            return axis
    return MIXED


def _indexed(index: Any, at: int, shape: Sequence[int]) -> int | None:
    """The axis after an index by ints, slices and None that leaves it whole; None for any other index."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts):
        return None
    # A size that no other axis has.
    rows = sum(shape) + 2
    after = torch.empty((*shape[:at], rows, *shape[at + 1 :]), device="meta")[index].shape
    return after.index(rows) if rows in after else None


def _aligned(before: Sequence[int], at: int, after: Sequence[int], length: int) -> int | None:
    """The axis after broadcasting; otherwise the only axis as long as the rows, if there is one."""
    candidate = len(after) - len(before) + at
    if at == 0 and len(after) <= len(before) and after[0] == before[0]:
        return 0
    if 0 <= candidate < len(after) and after[candidate] == before[at]:
        return candidate
    fitting = [axis for axis, size in enumerate(after) if size == before[at]]
    if len(fitting) == 1:
        return fitting[0]
    if at == 0 and after[0] % length == 0:
        return 0
    return MIXED if any(size % length == 0 for size in after) else None


def require_rows_first(what: str, *values: Any) -> None:
    """Raise FusionError for tensors of a padded batch whose batch axis is not the first."""
    for x in leaves(values):
        if isinstance(x, TrialTensor) and x.trials.rows is not None and x.rows_at:
            raise FusionError(
                f"{user_line()}\n  {what} mixes the rows of batches of different sizes, and the batch is not "
                f"its first axis (shape {tuple(x.shape)}); put the batch first, or give these trials batches "
                f"of one size"
            )
