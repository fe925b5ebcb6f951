"""What is looked at of a run's data before the first step: the same for all workers, and the same twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from plait.comm.collectives import all_gather_values
from plait.data.sampler import GlobalBatch, Position
from plait.data.streams import checksum, refuse_unlike
from plait.training.run import Run
from plait.verification import same_random_numbers

# Samples of a map-style set, and batches of a stream, that are looked at.
_SAMPLES, _BATCHES = 4, 4


def check_data(run: Run) -> None:
    """Refuse data of which workers see unlike samples; warn of samples that are not the same when read again.

    All workers call it together. A stream is read here only for a pipeline, whose model is traced with its
    first samples anyway; data-parallel workers compare it while they read it.
    """
    source, settings = run.parts.train_set, run.settings
    if source.is_stream:
        if settings.pipeline is not None and run.worker.world_size > 1:
            count = settings.data.batch_size * _BATCHES
            with same_random_numbers(settings.seed):
                own = checksum(source.first_samples(count, settings.seed))
            refuse_unlike(all_gather_values([source.length, own]))
    elif settings.verify.start != "off":
        _check_map_style(run)


def _check_map_style(run: Run) -> None:
    found = list(_read_in_turn(run))
    is_same_twice = found[0] == found[-1]
    if not is_same_twice:
        run.metrics.warn(
            "data.kind: samples are not the same when they are read again: their random choices come from a "
            "generator of the data set's own, so other numbers of workers or loaders, and a resumed run, see "
            "other samples; draw from torch's, Python's or numpy's global generator, which Plait seeds for "
            "each sample"
        )
    if run.worker.world_size > 1:
        answers = all_gather_values([len(run.parts.train_set), found[0], is_same_twice])
        # Where samples are never the same, nothing can be said about workers.
        are_same = all(is_same for *_, is_same in answers)
        refuse_unlike([[length, number if are_same else 0] for length, number, _ in answers])


def _read_in_turn(run: Run) -> Iterator[int]:
    """Checksums of the same first samples, read twice by the process that reads the run's data."""
    source, loaders = run.parts.train_set, run.settings.data.loaders
    samples = tuple(range(min(_SAMPLES, len(source))))
    # Loader processes take turns: the first is asked first and last.
    order = itertools.repeat(GlobalBatch(0, samples, Position()), max(loaders, 1) + 1)
    with same_random_numbers(run.settings.seed):
        for batch in run.load(source, order):
            yield checksum(batch.content)
