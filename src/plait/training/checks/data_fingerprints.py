"""Checks before step 1 that all workers have the same data, and that no test sample is trained on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.core.codec import decode, encode
from plait.core.errors import DataError
from plait.core.units import count_of
from plait.data.fingerprint import Fingerprint, repeated_samples, take_fingerprints
from plait.launcher.worker_process import Worker
from plait.training.setup.data import DataPair

SPLITS = ("train", "test")
log = logging.getLogger(__name__)


class UnlikeDataError(DataError):
    """This worker's data differ from another worker's; the others may continue without it."""

    everywhere = False


@dataclass(frozen=True)
class _WorkerData:
    """The fingerprints of the splits on one worker."""

    worker: int
    host: str
    splits: Mapping[str, Fingerprint | None]


def look_at_data(worker: Worker, sources: DataPair, seed: int, name: str = "") -> None:
    """Refuse data that differ from another worker's, and warn of test samples that are trained on.

    `sources` are the training and the test split. The first worker that comes says in the job's store what
    it sees of the data of that `name`; all others compare with that.
    """
    is_first = worker.id == 0
    if worker.world_size == 1 and not worker.memberships.can_change:
        seen = take_fingerprints(sources, seed, many=True)
    else:
        seen = take_fingerprints(sources, seed, many=is_first)
        _compare(worker, seen, name)
    if is_first and all(each is not None for each in seen):
        train, test = (each for each in seen if each is not None)
        _warn_of_repeats(train, test)


def _compare(worker: Worker, seen: Sequence[Fingerprint | None], name: str) -> None:
    local = _WorkerData(worker.id, worker.host, dict(zip(SPLITS, seen)))
    stored = worker.store.compare_set(f"plait/data/{name}", "", json.dumps(encode(local)))
    other = decode(_WorkerData, json.loads(stored), "data")
    for split, fingerprint in local.splits.items():
        if (difference := _difference(fingerprint, other.splits[split])) is not None:
            raise UnlikeDataError(
                f"data: worker {local.worker} on {local.host} has {difference[0]} in the {split} split, "
                f"worker {other.worker} on {other.host} has {difference[1]}; every worker must have the same "
                f"data: is a copy of its files incomplete or listed in another order? What is drawn at "
                f"random must follow torch's, numpy's or Python's own generator, which are seeded alike"
            )


def _difference(mine: Fingerprint | None, other: Fingerprint | None) -> tuple[str, str] | None:
    """Descriptions of the split on two workers if it differs; else None."""
    if mine is None or other is None:
        return None if mine is other else (_length(mine), _length(other))
    if mine.length != other.length:
        return _length(mine), _length(other)
    both = sorted(set(mine.samples) & set(other.samples))
    unlike = [number for number in both if mine.samples[number] != other.samples[number]]
    # A few differences may be random augmentation.
    if 2 * len(unlike) <= len(both):
        return None
    return f"other samples ({len(unlike)} of {len(both)} looked at, such as number {unlike[0]})", "its own"


def _length(fingerprint: Fingerprint | None) -> str:
    if fingerprint is None:
        return "no data"
    return "a stream without length" if fingerprint.length is None else count_of(fingerprint.length, "sample")


def _warn_of_repeats(train: Fingerprint, test: Fingerprint) -> None:
    repeated = repeated_samples(train.samples, test.samples)
    if not repeated:
        return
    number, place = repeated[0]
    log.warning(
        "data: %d of the %d test samples looked at are among the %d training samples looked at (test sample "
        "%d is training sample %d), so the test split does not say how the model does on new data; return "
        "splits that have nothing in common",
        len(repeated),
        len(test.samples),
        len(train.samples),
        number,
        place,
    )
