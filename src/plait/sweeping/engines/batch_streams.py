"""Where an array's batches come from: trials in the same order of the same data share one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from plait.data.loader import Batch, load, without_samples
from plait.data.sampler import Position, batches
from plait.schema.settings import TrainSettings

T = TypeVar("T")


class BatchStream:
    """The batches of a trial from some position on, one at a time: the share `place` of `workers` of each.

    Without `loads` their content is the numbers from 0 to their size: a pipeline's first stage loads for all.
    """

    def __init__(
        self,
        train_set: Any,
        settings: TrainSettings,
        position: Position,
        pin: bool,
        place: int = 0,
        workers: int = 1,
        loads: bool = True,
    ) -> None:
        data = settings.data
        self.order = _order(settings)
        self.position = position
        order = batches(
            position,
            len(train_set),
            data.batch_size,
            seed=settings.seed,
            shuffle=data.shuffle,
            keep_last=data.last_batch == "keep",
            own_order=train_set.own_order(settings.seed, data.batch_size),
        )
        if not loads:
            self._batches: Iterator[Batch] = map(without_samples, order)
            return
        self._batches = load(
            train_set,
            order,
            seed=settings.seed,
            rank=place,
            world_size=workers,
            loaders=data.loaders,
            pin=pin,
        )

    def next(self) -> Batch:
        batch = next(self._batches)
        self.position = batch.after
        return batch


def _order(settings: TrainSettings) -> tuple[int, int]:
    """What the order of samples depends on, within an array."""
    return settings.seed, settings.data.batch_size


class BatchStreams:
    """The streams of an array's trials; one that another trial reads already at the same place is shared."""

    def __init__(
        self, train_set: Any, pin: bool, place: int = 0, workers: int = 1, loads: bool = True
    ) -> None:
        self._train_set = train_set
        self._pin = pin
        self._share = (place, workers, loads)

    def find(self, settings: TrainSettings, position: Position, used: list[BatchStream]) -> BatchStream:
        """A stream for a trial at `position`: one of those `used`, or a new one."""
        for stream in used:
            if stream.order == _order(settings) and stream.position == position:
                return stream
        return BatchStream(self._train_set, settings, position, self._pin, *self._share)


def next_batches(streams: list[BatchStream]) -> list[Batch]:
    """The next batch of each stream; a stream that comes several times moves once."""
    taken: dict[int, Batch] = {}
    for stream in streams:
        if id(stream) not in taken:
            taken[id(stream)] = stream.next()
    return [taken[id(stream)] for stream in streams]


def with_replacements(present: Sequence[T], leaving: Sequence[int], joining: Sequence[T]) -> list[T]:
    """What belongs to each trial after a change; newcomers take the leavers' places, then new ones."""
    kept = dict(enumerate(present))
    for place in leaving:
        del kept[place]
    kept |= dict(zip(leaving, joining))
    return [kept[place] for place in sorted(kept)] + list(joining[len(leaving) :])
