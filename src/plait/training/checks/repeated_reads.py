"""Checks that workers read the same samples, and that samples are the same when read again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from plait.comm.collectives import all_gather_values
from plait.data.loader import load
from plait.data.loader_processes import load_aside
from plait.data.sampler import GlobalBatch, Position
from plait.data.streams import checksum, refuse_unlike
from plait.training.run import Run
from plait.verification import same_random_numbers

# How many samples of a map-style set, and batches of a stream, are compared.
_SAMPLES, _BATCHES = 4, 4
# The steps after which samples are read a second time.
_LATER = 8
# Time limit for reading samples in another process.
_ASIDE_S = 20.0


def check_data(run: Run) -> None:
    """Refuse data that differ between workers; warn of samples that change when read again.

    All workers call it together. A stream is read here only for a pipeline, whose model is traced with its
    first samples anyway; data-parallel workers compare it while they read it.
    """
    source, settings = run.components.train_set, run.settings
    if source.is_stream:
        if settings.in_stages and run.worker.world_size > 1:
            count = settings.data.batch_size * _BATCHES
            with same_random_numbers(settings.seed):
                local = checksum(source.first_samples(count, settings.seed))
            refuse_unlike(all_gather_values([source.length, local]))
    elif settings.verify.start != "off":
        _check_map_style(run)


def _check_map_style(run: Run) -> None:
    checksums = list(_read_in_turn(run))
    is_same_twice = checksums[0] == checksums[-1]
    if is_same_twice:
        run.audits.samples = checksums[0]
        if run.worker.rank == 0 and _keeps_draws(run):
            run.metrics.warn(
                "data.kind: samples were others where they had been read for an epoch before: the data set "
                "keeps what it drew (a cache), and every worker and loader process keeps its own, so other "
                "numbers of them, and a resumed run, see other samples; keep samples as they are before "
                "anything is drawn, or draw by a sample's number alone"
            )
    else:
        run.metrics.warn(
            "data.kind: samples are not the same when they are read again: their random choices come from a "
            "generator of the data set's own, so other numbers of workers or loaders, and a resumed run, see "
            "other samples; draw from torch's, Python's or numpy's global generator, which Plait seeds for "
            "each sample"
        )
    if run.worker.world_size > 1:
        answers = all_gather_values([len(run.components.train_set), checksums[0], is_same_twice])
        # If samples change at every read, workers cannot be compared.
        are_same = all(is_same for *_, is_same in answers)
        refuse_unlike([[length, number if are_same else 0] for length, number, _ in answers])


def look_again(run: Run, is_last: bool) -> None:
    """Read the samples again that were compared at the start, and warn if they have changed.

    That is done after some steps, after twice as many, and so on, and after the last.
    """
    known, source = run.audits.samples, run.components.train_set
    due = _LATER if is_last else max(_LATER, 2 * run.audits.looked)
    if known is None or run.trial.step < due:
        return
    run.audits.looked = run.trial.step
    with same_random_numbers(run.settings.seed):
        now = checksum(source.batch(0, _first_and_last(run), run.settings.seed))
    if now != known:
        run.audits.samples = None
        run.metrics.warn(
            f"data.kind: samples that were read before the first step were others when read again after step "
            f"{run.trial.step}: the data set changes while it is trained on (a count or a generator of its "
            f"own, files that are written), so other numbers of workers or loaders, and a resumed run, see "
            f"other samples"
        )


def _keeps_draws(run: Run) -> bool:
    """Whether some samples that were not read yet are others in epoch 1 where they were read in epoch 0, too.

    They are read in other processes, unless those that this one has read are the same in all epochs.
    """
    source, middle = run.components.train_set, len(run.components.train_set) // 2
    if not run.settings.data.loaders and not source.may_vary:
        return False
    numbers = tuple(range(max(0, middle - _SAMPLES // 2), middle + _SAMPLES // 2))
    numbers = numbers[: len(source)]

    def read(*epochs: int) -> list[int] | None:
        return load_aside((checksum(source.batch(e, numbers, run.settings.seed)) for e in epochs), _ASIDE_S)

    try:
        second, first = read(0, 1), read(1)
    except Exception:  # training reports the same error
        return False
    return second is not None and first is not None and second[-1] != first[-1]


def _first_and_last(run: Run) -> tuple[int, ...]:
    """The samples that are compared: some sets are sorted, and not all of their samples draw."""
    numbers, half = range(len(run.components.train_set)), _SAMPLES // 2
    return tuple(dict.fromkeys((*numbers[:half], *numbers[-half:])))


def _read_in_turn(run: Run) -> Iterator[int]:
    """Checksums of the same samples, read twice by the process that reads the run's data."""
    source, loaders, seed = run.components.train_set, run.settings.data.loaders, run.settings.seed
    samples = _first_and_last(run)
    # Loader processes take turns: the first is asked first and last.
    order = itertools.repeat(GlobalBatch(0, samples, Position()), max(loaders, 1) + 1)
    with same_random_numbers(seed):
        for batch in load(source, order, seed=seed, rank=0, world_size=1, loaders=loaders):
            yield checksum(batch.content)
