"""Batches as tensors: this worker's share of each global batch, fetched here or by loader processes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from plait.cluster.fork_server import die_with_parent
from plait.core.errors import DataError
from plait.runtime.sampling import GlobalBatch, Position, mix, share


@dataclass(frozen=True)
class Batch:
    """One step's work for this worker: `content` is (inputs, target), or None where no sample fell to it.

    `total` counts the samples of all workers, `count` this one's.
    """

    content: Any
    count: int
    total: int
    epoch: int
    after: Position


class SeededSamples(Dataset[Any]):
    """A data set whose random choices (crops, flips) depend on (seed, epoch, sample) alone.

    Keys are (epoch, sample). A set that has `__getitems__` draws nothing at random and gives batches at once.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._at_once = hasattr(dataset, "__getitems__")

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        if not keys:
            return None
        if self._at_once:
            return _checked(self._dataset.__getitems__([sample for _, sample in keys]))
        return _checked(default_collate([self[key] for key in keys]))

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, sample = key
        seed_all(mix(self._seed, epoch, sample))
        return self._dataset[sample]


def _checked(content: Any) -> Any:
    if not isinstance(content, (tuple, list)) or len(content) != 2:
        found = (
            f"{len(content)} items" if isinstance(content, (tuple, list)) else f"a {type(content).__name__}"
        )
        raise DataError(
            f"data.kind: the data set gave {found} a sample, expected (input, target); "
            f"several inputs go into a tuple, ((a, b), target), or a dict of the model's arguments"
        )
    return content


def seed_all(number: int) -> None:
    """Let every source of random numbers that model and data code may use start from `number`."""
    # torch.manual_seed would note a stack trace for GPUs that nobody uses, a millisecond each time.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def load(
    dataset: Any,
    batches: Iterator[GlobalBatch],
    *,
    seed: int,
    rank: int,
    world_size: int,
    loaders: int,
    pin: bool = False,
) -> Iterator[Batch]:
    """This rank's share of each of `batches`, in order; `pin` prepares it for a copy to a GPU."""
    samples = SeededSamples(dataset, seed)
    if loaders == 0:
        for batch in batches:
            mine = share(batch.samples, rank, world_size)
            content = samples.__getitems__([(batch.epoch, s) for s in mine])
            yield Batch(content, len(mine), len(batch.samples), batch.epoch, batch.after)
        return
    yield from _load_in_processes(samples, batches, rank, world_size, loaders, pin)


def _load_in_processes(
    samples: SeededSamples,
    batches: Iterator[GlobalBatch],
    rank: int,
    world_size: int,
    loaders: int,
    pin: bool,
) -> Iterator[Batch]:
    ahead: list[GlobalBatch] = []

    def keys() -> Iterator[list[tuple[int, int]]]:
        for batch in batches:
            ahead.append(batch)
            yield [(batch.epoch, s) for s in share(batch.samples, rank, world_size)]

    loader = DataLoader(
        samples,
        batch_sampler=_Keys(keys()),
        num_workers=loaders,
        collate_fn=_as_it_is,
        worker_init_fn=_start_loader,
        pin_memory=pin,
    )
    for content in loader:
        batch = ahead.pop(0)
        count = len(share(batch.samples, rank, world_size))
        yield Batch(content, count, len(batch.samples), batch.epoch, batch.after)


class _Keys:
    """An iterator in the form that DataLoader takes as a batch sampler."""

    def __init__(self, keys: Iterator[list[tuple[int, int]]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._keys


def _as_it_is(content: Any) -> Any:
    return content


def _start_loader(_: int) -> None:
    die_with_parent(os.getppid())
    torch.set_num_threads(1)


def cut(content: Any, count: int, pieces: int) -> Iterator[tuple[Any, int]]:
    """`content` cut along its first axis into at most `pieces` microbatches, each with its sample count."""
    pieces = min(pieces, count)
    for i in range(pieces):
        begin, end = count * i // pieces, count * (i + 1) // pieces
        part = content if pieces == 1 else tree_map(lambda x, b=begin, e=end: x[b:e], content)
        yield part, end - begin


def to_device(content: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """`content` on `device`; floating tensors as `dtype` when one is given."""

    def move(x: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
        return x.to(device, wanted, non_blocking=True)

    return tree_map(lambda x: move(x) if isinstance(x, torch.Tensor) else x, content)
