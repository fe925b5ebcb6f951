"""Batches of a stream: samples are in the stream's order, and its length may be unknown.

Every worker reads the whole stream and takes its share of each batch, so the samples of a step do not depend
on the number of workers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from plait.core.errors import DataError
from plait.data.batches import DataSource, read_epoch
from plait.data.loader import Batch
from plait.data.loader_processes import load_stream
from plait.data.sampler import GlobalBatch, Position, share


@dataclass(frozen=True)
class StreamOrder:
    """Which batches to read from a stream: from `start` to the end of epoch `epochs`, or without end."""

    start: Position
    batch_size: int
    keep_last: bool
    epochs: int | None
    seed: int


def stream_batches(
    source: DataSource, order: StreamOrder, rank: int, world_size: int, loaders: int, pin: bool = False
) -> Iterator[Batch]:
    """This rank's share of each batch of the stream, in order; the last one is marked."""
    batches = _shares(source, order, rank, world_size)
    if loaders == 0:
        yield from batches
        return
    # A None item would end the stream, so the content, which may be None, is sent in a pair.
    for content, rest in load_stream(((b.content, replace(b, content=None)) for b in batches), pin):
        yield replace(rest, content=content)


def compared(
    batches: Iterator[Batch], group: dist.ProcessGroup | None = None, last: int | None = None
) -> Iterator[Batch]:
    """The batches, unless workers of `group` (default: of the world) read different streams.

    They compare after 1, 2, 4, 8, ... batches, and after the last, number `last`; all read them in lockstep.
    """
    for number, batch in enumerate(batches, 1):
        if number & (number - 1) == 0 or batch.last or number == last:
            local = torch.tensor([batch.checksum, batch.total])
            gathered = [torch.zeros_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, local, group=group)
            refuse_unlike([one.tolist() for one in gathered])
        yield batch


def refuse_unlike(checksums: Sequence[Any]) -> None:
    """Raise if a worker's samples differ from the first worker's, given a checksum of each."""
    unlike = [rank for rank, one in enumerate(checksums) if one != checksums[0]]
    if unlike:
        raise DataError(
            f"data.kind: worker {unlike[0]} read other samples than worker 0; every worker must read all of "
            f"the data in the same order, and Plait gives it a share: leave out what divides it by rank, and "
            f"let random choices follow torch's, Python's or numpy's own generator"
        )


def _shares(source: DataSource, order: StreamOrder, rank: int, world_size: int) -> Iterator[Batch]:
    batches = _batches(source.dataset, order)
    read = next(batches, None)
    sum_so_far = 0
    while read is not None:
        sum_so_far = checksum(read.samples, sum_so_far)
        local = list(share(read.samples, rank, world_size))
        # Before the next samples are read, as a stream may reuse the same tensor.
        content = source.collated(local)
        # Read one batch ahead, as the caller must know whether the epoch or the run ends with this one.
        following = next(batches, None)
        last, after = following is None, read.after
        if (following is None or following.epoch > read.epoch) and after.stream is None:
            # Resume at the next epoch. With a state, a resumed run finds the end of this epoch itself.
            after = Position(read.epoch + 1)
        yield Batch(content, len(local), len(read.samples), read.epoch, after, last, sum_so_far)
        read = following


def _batches(dataset: Any, order: StreamOrder) -> Iterator[GlobalBatch]:
    """All batches, epoch after epoch; the next epoch begins where the stream ends."""
    epoch, begin, state = order.start.epoch, order.start.sample, order.start.stream
    while order.epochs is None or epoch < order.epochs:
        is_empty = True
        for read in _epoch_batches(dataset, order, epoch, begin, state):
            is_empty = False
            yield read
        # A resumed epoch may have no samples left.
        if is_empty and not begin:
            raise DataError(_empty(order, epoch))
        epoch, begin, state = epoch + 1, 0, None


def _empty(order: StreamOrder, epoch: int) -> str:
    short = f", or fewer than data.batch_size ({order.batch_size}) with last_batch: drop"
    return (
        f"data.kind: the stream gave no sample in epoch {epoch}{'' if order.keep_last else short}; expected "
        f"a data set whose __iter__ starts from the beginning each time (a generator can be read only once)"
    )


def _epoch_batches(
    dataset: Any, order: StreamOrder, epoch: int, begin: int, state: Any
) -> Iterator[GlobalBatch]:
    samples: list[Any] = []
    number = begin
    for sample in read_epoch(dataset, order.seed, epoch, begin, state):
        samples.append(sample)
        number += 1
        if len(samples) == order.batch_size:
            yield GlobalBatch(epoch, tuple(samples), Position(epoch, number, _state_of(dataset)))
            samples = []
    if samples and order.keep_last:
        # The stream has ended before these are yielded, so its state is that at the start of the next epoch.
        yield GlobalBatch(epoch, tuple(samples), Position(epoch + 1, 0, _state_of(dataset)))


def _state_of(dataset: Any) -> Any:
    """The stream's state, or None if it has none that JSON can represent."""
    if not has_state(dataset):
        return None
    state = dataset.state_dict()
    try:
        kept = json.loads(json.dumps(state))
    except (TypeError, ValueError):
        return None
    return kept if kept == state else None


def has_state(dataset: Any) -> bool:
    """Whether the stream can save its position and continue from it."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def checksum(samples: Any, before: int = 0) -> int:
    """A checksum of the tensors, arrays, numbers and text in `samples`; other objects do not count.

    `before` is the checksum of the earlier samples.
    """
    value = before
    for leaf in pytree.tree_leaves(samples):
        if isinstance(leaf, torch.Tensor):
            leaf = as_array(leaf)
        if isinstance(leaf, numpy.ndarray):
            value = zlib.crc32(leaf.tobytes(), value)
        elif isinstance(leaf, (int, float, str, bytes)):
            value = zlib.crc32(repr(leaf).encode(), value)
    return value


def as_array(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """The tensor as an array; of a type that numpy does not have, its bytes."""
    try:
        return tensor.numpy(force=True)
    except TypeError:
        return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
