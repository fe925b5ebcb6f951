"""Where the batches of trials come from: trials in the same order of the same data share one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from plait.data.loader import Batch, load, without_samples
from plait.data.sampler import Position, batches
from plait.schema.settings import TrainSettings

T = TypeVar("T")


class BatchStream:
    """The batches of a trial from some position on, one at a time; `order` is what their order depends on."""

    def __init__(self, batches: Iterator[Batch], position: Position, order: tuple[int, int] = (0, 0)) -> None:
        self._batches = batches
        self.position = position
        self.order = order

    def next(self) -> Batch | None:
        """The next batch; None where the data have ended."""
        batch = next(self._batches, None)
        if batch is not None:
            self.position = batch.after
        return batch


def order_of(settings: TrainSettings) -> tuple[int, int]:
    """What the order of samples depends on, among trials of a sweep."""
    return settings.seed, settings.data.batch_size


def open_stream(
    train_set: Any,
    settings: TrainSettings,
    position: Position,
    share: tuple[int, int] = (0, 1),
    pin: bool = False,
    loads: bool = True,
) -> BatchStream:
    """The batches from `position` on: the first of `share` of as many shares as the second says.

    Without `loads` their content is the numbers from 0 to their size: a pipeline's first stage loads for all.
    """
    data = settings.data
    order = batches(
        position,
        len(train_set),
        data.batch_size,
        seed=settings.seed,
        shuffle=data.shuffle,
        keep_last=data.last_batch == "keep",
        own_order=train_set.own_order(settings.seed, data.batch_size),
    )
    rank, world_size = share
    read: Iterator[Batch] = map(without_samples, order)
    if loads:
        loaders = data.loaders
        read = load(
            train_set, order, seed=settings.seed, rank=rank, world_size=world_size, loaders=loaders, pin=pin
        )
    return BatchStream(read, position, order_of(settings))


def find_stream(
    settings: TrainSettings, position: Position, used: Sequence[BatchStream | None]
) -> BatchStream | None:
    """A stream for a trial at `position` among those `used`, which another trial reads at the same place."""
    streams = (stream for stream in used if stream is not None)
    return next((s for s in streams if s.order == order_of(settings) and s.position == position), None)


def next_batches(streams: Sequence[BatchStream]) -> list[Batch]:
    """The next batch of each stream, or nothing where one has ended; one that is there twice moves once."""
    taken: dict[int, Batch | None] = {}
    for stream in streams:
        if id(stream) not in taken:
            taken[id(stream)] = stream.next()
    batches = [batch for stream in streams if (batch := taken[id(stream)]) is not None]
    return batches if len(batches) == len(streams) else []


def with_replacements(present: Sequence[T], leaving: Sequence[int], joining: Sequence[T]) -> list[T]:
    """What belongs to each trial after a change; newcomers take the leavers' places, then new ones."""
    kept = dict(enumerate(present))
    for slot in leaving:
        del kept[slot]
    kept |= dict(zip(leaving, joining))
    return [kept[slot] for slot in sorted(kept)] + list(joining[len(leaving) :])
