"""A look at a few samples of each split before they are trained on: are they what every worker has, is the
test split new?

Samples are read in a process of their own, so that neither generators nor files of the data set notice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset

from plait.data.batches import DataSource
from plait.data.loader_processes import load_aside
from plait.data.streams import checksum

# Samples that workers compare, and those of each split that are looked for in the other.
FEW, MANY = 8, 1000
# How long one split is looked at; one sample is, however long it takes.
LOOK_S = 0.1
# How long the process that looks may take, with whatever it does to begin with.
LONGEST_S = 20.0


@dataclass(frozen=True)
class Fingerprint:
    """The length of a split, and checksums of some samples by their numbers.

    There are none of a stream, whose samples may come once only, nor of a set whose samples are others each
    time they are read.
    """

    length: int | None
    samples: Mapping[int, int]


def take_fingerprints(
    sources: tuple[DataSource | None, DataSource | None], seed: int, many: bool = False
) -> list[Fingerprint | None]:
    """What is seen of the two splits at a glance; with `many`, of as many samples as there is time for."""
    numbers = [_spread(source, FEW) for source in sources]
    more: list[Iterable[int]] = [()] * len(sources)
    if many:
        common = _common_indices(*sources)
        more = [[*first, *_spread(source, MANY)] for first, source in zip(common, sources)]
    # What the process cannot do (it ends, hangs, or must not use the GPU), nobody is told of here.
    looks = (_look(source, seed, *which) for source, *which in zip(sources, numbers, more))
    found = load_aside(looks, LONGEST_S) or [{}] * len(sources)
    return [
        None if source is None else Fingerprint(source.length, samples)
        for source, samples in zip(sources, found)
    ]


def _spread(source: DataSource | None, count: int) -> list[int]:
    """Up to `count` numbers of samples, the first and the last among them."""
    if source is None or source.is_stream:
        return []
    last = len(source) - 1
    steps = min(count, len(source)) - 1
    return [0] if steps < 1 else [last * step // steps for step in range(steps + 1)]


def _common_indices(first: DataSource | None, second: DataSource | None) -> tuple[list[int], list[int]]:
    """Numbers of samples that two parts of one data set seem to have in common, in each of them."""
    parts = [_root_of(source) for source in (first, second)]
    if any(part is None for part in parts):
        return [], []
    (root, indices), (other, others) = (part for part in parts if part is not None)
    if type(root) is not type(other) or len(root) != len(other):
        return [], []
    places = {index: number for number, index in enumerate(indices)}
    both = [(places[index], number) for number, index in enumerate(others) if index in places][:MANY]
    return [a for a, _ in both], [b for _, b in both]


def _root_of(source: DataSource | None) -> tuple[Any, list[int]] | None:
    """The data set that a split is a part of, and the numbers that its samples have there."""
    dataset = None if source is None else source.dataset
    if not isinstance(dataset, Subset):
        return None
    indices = [int(index) for index in dataset.indices]
    while isinstance(dataset.dataset, Subset):
        dataset = dataset.dataset
        indices = [int(dataset.indices[index]) for index in indices]
    return (dataset.dataset, indices) if hasattr(dataset.dataset, "__len__") else None


def _look(source: DataSource | None, seed: int, few: Iterable[int], more: Iterable[int]) -> dict[int, int]:
    """Checksums of the samples; none of a set whose samples are others when they are read again."""
    if source is None:
        return {}
    begun = time.monotonic()

    def read(numbers: Iterable[int], at_least: int = 1) -> Iterator[tuple[int, int]]:
        for place, number in enumerate(numbers):
            if place >= at_least and time.monotonic() - begun > LOOK_S:
                return
            try:
                yield number, checksum([source.sample(0, number, seed)])
            except Exception:  # whoever trains on it meets it, and says so
                continue

    found = dict(read(few))
    if dict(read(found)).items() - found.items():
        return {}
    return found | dict(read(more, at_least=0))


def repeated_samples(train: Mapping[int, int], test: Mapping[int, int]) -> list[tuple[int, int]]:
    """Samples of the test split that are also in the training split, as (test, training) numbers.

    None where that is to be expected: of data with equal samples within a split, some are in both.
    """
    of_train, of_test = Counter(train.values()), Counter(test.values())
    places = {found: number for number, found in train.items()}
    repeated = [(number, places[found]) for number, found in test.items() if found in places]
    if len(repeated) < 2:
        return []
    equal = sum(n * (n - 1) for count in (of_train, of_test) for n in count.values()) / 2
    pairs = sum(len(each) * (len(each) - 1) for each in (train, test)) / 2
    across = sum(n * of_train[found] for found, n in of_test.items())
    return repeated if across > 3 * equal / pairs * len(train) * len(test) else []
