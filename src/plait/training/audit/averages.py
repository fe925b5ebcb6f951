"""Checks averaging: whether members hold the mean of their weights, by comparing sums of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.sync.averaging.base import WeightAveraging
from plait.sync.averaging.pair_sync import PairSync
from plait.sync.averaging.partial_reduce import PartialReduce

# Sums of many numbers in another order.
_ROUNDING = 1e-4


def is_mean(averaging: WeightAveraging, before: Sequence[Sequence[float]], after: Sequence[float]) -> bool:
    """Whether `after` are the means of all members' sums `before`.

    Only checked for syncs that take the plain mean of all members; else True.
    """
    if not isinstance(averaging, (PartialReduce, PairSync)):
        return True
    for number, mean in enumerate(after):
        sums = [member[number] for member in before]
        scale = max(1.0, *map(abs, sums))
        if math.isfinite(mean) and abs(mean - sum(sums) / len(sums)) > _ROUNDING * scale:
            return False
    return True
