"""The order of samples in shards: shuffled, but each worker reads few shards at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

LaneOrder: TypeAlias = Sequence[int]


def lane_order(samples: Sequence[int], seed: int, batch_size: int, lanes: int) -> LaneOrder:
    """All samples of shards of the given sizes, once; each of `lanes` readers reads one shard at a time.

    Shards are assigned, in a shuffled order, to the lane with the fewest samples. A batch consists of
    consecutive parts, one of each lane, in order; if a lane has ended, others contribute more. The order does
    not depend on the number of workers, nor on where a run was resumed.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    begins = np.concatenate([[0], np.cumsum(samples)])
    dealt: list[list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = [[] for _ in range(lanes)]
    sizes = [0] * lanes
    for shard in generator.permutation(len(samples)):
        lane = sizes.index(min(sizes))
        dealt[lane].append(begins[shard] + generator.permutation(samples[shard]))
        sizes[lane] += samples[shard]
    rows = [np.concatenate(lane) if lane else np.empty(0, np.int64) for lane in dealt]
    return _merged(rows, batch_size).tolist()


def _merged(
    lanes: list[np.ndarray[tuple[int], np.dtype[np.int64]]], batch_size: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The batches, each in equal parts of the remaining lanes."""
    parts = []
    left = [lane for lane in lanes if len(lane)]
    while left:
        ends = [batch_size * i // len(left) for i in range(len(left) + 1)]
        for index, (begin, end) in enumerate(pairwise(ends)):
            parts.append(left[index][: end - begin])
            left[index] = left[index][end - begin :]
        left = [lane for lane in left if len(lane)]
    return np.concatenate(parts)
