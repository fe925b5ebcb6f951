"""Compares the loss of a batch with the mean of the losses of its parts, as which parts train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Samples of each part; with few, parts differ from each other.
_AT_A_TIME = 2
# Larger differences, relative to the loss, are not rounding.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOWER_PRECISION = 3e-2


def whole_and_in_parts(loss: Callable[[int, int], float], count: int) -> tuple[float, float]:
    """The loss of `count` samples, and the mean of those of their parts; `loss` is that of some rows."""
    ranges = [(i, min(i + _AT_A_TIME, count)) for i in range(0, count, _AT_A_TIME)]
    return loss(0, count), sum(loss(a, b) * (b - a) for a, b in ranges) / count


def describe_difference(count: int, whole: float, mean: float, precision: torch.dtype) -> str:
    """What it means that these differ; empty if they do not, but for rounding in `precision`."""
    tolerance = _TOLERANCES.get(precision, _LOWER_PRECISION)
    # A part whose targets are all ignored has a NaN loss.
    if abs(whole - mean) <= tolerance * abs(whole):
        return ""
    return (
        f"loss: of {count} samples it is {whole:.6g}, but {mean:.6g} as the mean of their parts, as where "
        f"padding is left out or classes are weighted; a batch that is trained in parts (workers, "
        f"microbatches, accumulate) takes the mean of its parts, weighted by samples, which differs from one "
        f"process on whole batches; return a sum divided by the number of samples where that matters"
    )


def rows_of(batch: Any, count: int, begin: int, end: int) -> Any:
    """Some samples of a batch; raises ValueError where a part of it does not hold one row a sample."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != count:
            raise ValueError("not in rows")
        return leaf[begin:end].clone()

    return pytree.tree_map(cut, batch)
