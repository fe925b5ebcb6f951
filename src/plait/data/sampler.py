"""Which samples a step uses, as a function of only (seed, epoch, position).

The order does not depend on world size and batch size, so either can change between two steps without
repeating or skipping samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from plait.core.splits import part
from plait.data.seeding import mix

# More samples than any endless stream yields.
ENDLESS = 1 << 62


@dataclass(frozen=True)
class Position:
    """The position of a run in its data: `sample` samples of epoch `epoch` were used.

    `stream` is the stream's `state_dict` at this position, if it has one.
    """

    epoch: int = 0
    sample: int = 0
    stream: Any = None


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step over all workers, by number or those of a stream, and the position after it."""

    epoch: int
    samples: tuple[Any, ...]
    after: Position


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

    The last batch of an epoch is smaller if `batch_size` does not divide the rest; with `keep_last=False` it
    is dropped. With `shuffle`, `own_order(epoch)`, if given, is the order.
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
    """The share of a global batch of `rank`: consecutive samples; sizes differ by at most one."""
    rows = part(len(samples), rank, world_size)
    return samples[rows.start : rows.stop]


def steps_per_epoch(samples: int, batch_size: int, keep_last: bool) -> int:
    return -(-samples // batch_size) if keep_last else samples // batch_size
