"""Which samples a step uses, as a function of (seed, epoch, position) alone.

World size and batch size do not enter the order, so either can change between two steps and no sample is
repeated or skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from plait.core.splits import part

# More samples than any stream without an end gives.
ENDLESS = 1 << 62


@dataclass(frozen=True)
class Position:
    """How far a run is in its data: `sample` samples of epoch `epoch` are used up.

    `stream` is what a stream's `state_dict` said there, of a set that has one.
    """

    epoch: int = 0
    sample: int = 0
    stream: Any = None


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step over all workers, and the position after it."""

    epoch: int
    samples: tuple[int, ...]
    after: Position


def mix(*numbers: int) -> int:
    """A 63-bit number that looks random and depends on all of `numbers` (splitmix64 over each in turn)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int, shuffle: bool) -> Sequence[int]:
    """The order in which epoch `epoch` visits the samples."""
    if not shuffle:
        return range(samples)
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return tuple(torch.randperm(samples, generator=generator).tolist())


def batches(
    start: Position,
    samples: int,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool,
    keep_last: bool,
    own_order: Callable[[int], Sequence[int]] | None = None,
) -> Iterator[GlobalBatch]:
    """The batches from `start` on, epoch after epoch without end.

    The last batch of an epoch is smaller when `batch_size` does not divide what is left; with
    `keep_last=False` it is left out. With `shuffle`, `own_order(epoch)` is the order where it is given.
    """
    epoch, sample = start.epoch, start.sample
    while True:
        if shuffle and own_order is not None:
            order = own_order(epoch)
        else:
            order = epoch_order(seed, epoch, samples, shuffle)
        while sample < samples and (keep_last or sample + batch_size <= samples):
            end = min(sample + batch_size, samples)
            after = (
                Position(epoch, end) if has_next(end, samples, batch_size, keep_last) else Position(epoch + 1)
            )
            yield GlobalBatch(epoch, tuple(order[sample:end]), after)
            sample = end
        epoch, sample = epoch + 1, 0


def has_next(sample: int, samples: int, batch_size: int, keep_last: bool) -> bool:
    """Whether the epoch has another batch after `sample` samples."""
    return sample < samples if keep_last else sample + batch_size <= samples


def share(samples: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """The part of a global batch that `rank` works on: consecutive, sizes differing by one at most."""
    own = part(len(samples), rank, world_size)
    return samples[own.start : own.stop]


def steps_per_epoch(samples: int, batch_size: int, keep_last: bool) -> int:
    return -(-samples // batch_size) if keep_last else samples // batch_size
