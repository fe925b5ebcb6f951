"""Batch streams of trials: trials that read the same data in the same order share one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar
from zlib import crc32

import torch.distributed as dist

from plait.data.batches import DataSource
from plait.data.loader import Batch, BatchStream, load, without_samples
from plait.data.sampler import ENDLESS, GlobalBatch, batches
from plait.data.streams import StreamOrder, compared, stream_batches
from plait.training.trial import Trial

T = TypeVar("T")


def order_of(trial: Trial) -> tuple[int, ...]:
    """A key for the order of samples; trials with equal keys at one position read the same batches."""
    data = trial.settings.data
    content = crc32(repr((data.kind, data.options)).encode())
    return trial.settings.seed, trial.batch.job_size, trial.batch.size, content


def open_stream(
    train_set: DataSource,
    trial: Trial,
    share: tuple[int, int] = (0, 1),
    pin: bool = False,
    loads: bool = True,
    in_stages: bool = False,
    group: dist.ProcessGroup | None = None,
    epochs: int | None = None,
    last: int | None = None,
) -> BatchStream:
    """The next batches of a trial; of each, this worker's part, by its `share` (rank, world size).

    Without `loads` their content is the numbers from 0 to their size: a pipeline's first stage loads for all.
    Its other stages know where epochs end from the length of the data, which a stream must have if
    `in_stages`.
    The workers of `group`, who call it together, compare what they read of a stream, also after batch `last`;
    it ends after as many `epochs` (None: never).
    """
    settings, position = trial.settings, trial.position
    data = settings.data
    if train_set.is_stream and not in_stages:
        samples = StreamOrder(position, trial.batch.size, data.last_batch == "keep", epochs, settings.seed)
        stream = stream_batches(train_set, samples, *share, data.loaders, pin)
        stream = stream if group is None else compared(stream, group, last)
        return BatchStream(stream, position, order_of(trial))
    order = sample_order(train_set, trial)
    rank, world_size = share
    read: Iterator[Batch] = map(without_samples, order)
    if loads:
        loaders = data.loaders
        read = load(
            train_set, order, seed=settings.seed, rank=rank, world_size=world_size, loaders=loaders, pin=pin
        )
    return BatchStream(read, position, order_of(trial))


def sample_order(train_set: DataSource, trial: Trial) -> Iterator[GlobalBatch]:
    """The next batches of a trial, as sample numbers."""
    settings, data = trial.settings, trial.settings.data
    return batches(
        trial.position,
        ENDLESS if train_set.length is None else len(train_set),
        trial.batch.size,
        seed=settings.seed,
        shuffle=data.shuffle and not train_set.is_stream,
        keep_last=data.last_batch == "keep",
        own_order=train_set.own_order(settings.seed, data.batch_size),
    )


def find_stream(trial: Trial, used: Sequence[BatchStream | None]) -> BatchStream | None:
    """A stream in `used` that can be shared with a trial; None if there is none."""
    streams = (stream for stream in used if stream is not None)
    return next((s for s in streams if s.order == order_of(trial) and s.position == trial.position), None)


def next_batches(streams: Sequence[BatchStream]) -> list[Batch]:
    """The next batch of each stream, or nothing if one has ended; a shared stream advances once."""
    taken: dict[int, Batch | None] = {}
    for stream in streams:
        if id(stream) not in taken:
            taken[id(stream)] = stream.next()
    batches = [batch for stream in streams if (batch := taken[id(stream)]) is not None]
    return batches if len(batches) == len(streams) else []


def with_replacements(present: Sequence[T], leaving: Sequence[int], joining: Sequence[T]) -> list[T]:
    """The items of all trials after a change: joining ones take the slots of leaving ones, then new slots."""
    kept = dict(enumerate(present))
    for slot in leaving:
        del kept[slot]
    kept |= dict(zip(leaving, joining))
    return [kept[slot] for slot in sorted(kept)] + list(joining[len(leaving) :])
