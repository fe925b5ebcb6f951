"""Loads this worker's share of each global batch, in this process or by loader processes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from plait.core.errors import DataError
from plait.core.splits import split
from plait.data.batches import DataSource
from plait.data.loader_processes import LoaderPool
from plait.data.sampler import GlobalBatch, Position, share
from plait.data.seeding import seed_all

__all__ = ["Batch", "DataSource", "cut", "load", "seed_all", "to_device"]

# The epoch and sample numbers of one batch, and its seed.
Key = tuple[int, tuple[int, ...], int]


@dataclass(frozen=True)
class Batch:
    """This worker's share of one step: `content` is (inputs, target), or None if it has no samples.

    `total` counts the samples of all workers, `count` this one's. For a stream, `last` says that no batch
    follows, and `checksum` covers all samples of all workers up to this batch.
    """

    content: Any
    count: int
    total: int
    epoch: int
    after: Position
    last: bool = False
    checksum: int = 0


class BatchStream:
    """The batches of a trial from some position on, one at a time; `order` is what their order depends on."""

    def __init__(self, batches: Iterator[Batch], position: Position, order: tuple[int, ...] = ()) -> None:
        self._batches = batches
        self.position = position
        self.order = order
        # Whether the last batch could not be read.
        self.has_failed = False

    def next(self) -> Batch | None:
        """The next batch; None at the end of the data."""
        self.has_failed = True
        batch = next(self._batches, None)
        self.has_failed = False
        if batch is not None:
            self.position = batch.after
        return batch


def without_samples(batch: GlobalBatch) -> Batch:
    """The batch for a worker that reads no data: only its size."""
    count = len(batch.samples)
    return Batch(range(count), count, count, batch.epoch, batch.after)


def load(
    source: Any,
    batches: Iterator[GlobalBatch],
    *,
    seed: int,
    rank: int,
    world_size: int,
    loaders: int,
    pin: bool = False,
) -> Iterator[Batch]:
    """This rank's share of each of `batches`, in order; `pin` puts it into pinned memory.

    `source` is a `DataSource` or a data set. For a stream the sample numbers must increase.
    """
    source = source if isinstance(source, DataSource) else DataSource(source)
    # Several processes would each read the whole stream.
    loaders = min(loaders, 1) if source.is_stream else loaders
    if loaders == 0:
        for batch in batches:
            mine = share(batch.samples, rank, world_size)
            yield _made(batch, source.batch(batch.epoch, mine, seed), len(mine))
        return
    ahead: list[tuple[GlobalBatch, int]] = []

    def keys() -> Iterator[Key]:
        for batch in batches:
            mine = tuple(share(batch.samples, rank, world_size))
            ahead.append((batch, len(mine)))
            yield batch.epoch, mine, seed

    # Closed explicitly, as Python 3.12 keeps the locals of a closed generator until it is freed.
    with contextlib.closing(_load_batches(source, keys(), loaders, pin)) as contents:
        for content in contents:
            batch, count = ahead.pop(0)
            yield _made(batch, content, count)


def _made(batch: GlobalBatch, content: Any, count: int) -> Batch:
    return Batch(content, count, len(batch.samples), batch.epoch, batch.after)


def cut(content: Any, count: int, microbatches: int) -> Iterator[tuple[Any, int]]:
    """`content`, (inputs, target), cut into at most `microbatches`, each with its sample count.

    Tensors are cut along their first axis. A list with one item for each sample is cut as a list.
    """
    microbatches = min(microbatches, count)
    for rows in split(count, microbatches):
        begin, end = rows.start, rows.stop
        if microbatches == 1:
            part = content
        elif isinstance(content, range):  # sample numbers, if another worker loads
            part = content[begin:end]
        else:
            part = tuple(_rows(half, begin, end, count) for half in content)
        yield part, end - begin


def without_rows(content: Any) -> Any:
    """A batch of one sample without that sample: tensors keep their other axes."""
    return _rows(content, 0, 0, 1)


def _rows(content: Any, begin: int, end: int, count: int) -> Any:
    if isinstance(content, Tensor) and content.dim() and len(content) == count:
        return content[begin:end]
    if isinstance(content, dict):
        return {name: _rows(part, begin, end, count) for name, part in content.items()}
    if isinstance(content, (tuple, list)):
        if len(content) == count and not _is_batched(content, count):
            return content[begin:end]
        parts = [_rows(part, begin, end, count) for part in content]
        if hasattr(content, "_fields"):
            return type(content)(*parts)
        return tuple(parts) if isinstance(content, tuple) else parts
    if content is None or isinstance(content, (int, float, bool)):
        return content
    found = f"a tensor of shape {tuple(content.shape)}" if isinstance(content, Tensor) else repr(content)
    raise DataError(
        f"data: cannot cut a batch of {count} samples that holds {found}; expected tensors with the samples "
        f"first, or lists with an item for each; use accumulate: 1 or a data.collate_fn that gives these"
    )


def _is_batched(content: Any, count: int) -> bool:
    """Whether each item holds all samples, like the inputs of a model, and not one sample each."""
    leaves = tree_leaves(content)
    tensors = all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count for leaf in leaves)
    return tensors and all(isinstance(item, Tensor) for item in content)


def to_device(content: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """`content` on `device`; floating-point tensors are cast to `dtype`, if given."""

    def move(x: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
        return x.to(device, wanted, non_blocking=True)

    return tree_map(lambda x: move(x) if isinstance(x, torch.Tensor) else x, content)


def _load_batches(
    source: DataSource, keys: Iterable[Key], loaders: int, pin: bool
) -> Generator[Any, None, None]:
    """The batches of `keys`, in order, made by `loaders` processes; `pin` puts them into pinned memory."""
    idle = source.idle_loaders.setdefault(loaders, [])
    # They use a copy without the idle loaders, as a reference cycle would keep the processes alive.
    copied = copy.copy(source)
    copied.idle_loaders = {}
    pool = idle.pop() if idle else LoaderPool(loaders, lambda key: copied.batch(*key))
    try:
        yield from pool.run(keys, pin)
    except GeneratorExit:
        idle.append(pool)
        raise
    idle.append(pool)
