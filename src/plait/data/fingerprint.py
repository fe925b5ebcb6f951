"""Checksums of a few samples of each split before training: do all workers have the same data, and is the
test split disjoint from the training split?

Samples are read in another process, so that generators and files of the data set are not affected.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from plait.data.batches import DataSource
from plait.data.generators import kept_generators
from plait.data.loader_processes import load_aside
from plait.data.streams import as_array, checksum

# How many samples workers compare, and how many of each split are searched in the other.
FEW, MANY = 8, 1000
# The time limit per split; two samples are always read.
LOOK_S = 0.1
# How many samples that are rows of tensors are read between two looks at the clock.
_AT_ONCE = 32
# The time limit of the reading process, including its start.
LONGEST_S = 20.0


@dataclass(frozen=True)
class Fingerprint:
    """The length of a split, and checksums of some samples by number.

    There are no checksums for a stream, which may be readable only once, nor for a set whose samples change
    each time they are read.
    """

    length: int | None
    samples: Mapping[int, int]


def take_fingerprints(
    sources: tuple[DataSource | None, DataSource | None], seed: int, many: bool = False
) -> list[Fingerprint | None]:
    """Fingerprints of the two splits; with `many`, of as many samples as the time limit allows."""
    numbers = [_spread(source, FEW) for source in sources]
    more: list[Iterable[int]] = [()] * len(sources)
    if many:
        common = _common_indices(*sources)
        more = [[*first, *_spread(source, MANY)] for first, source in zip(common, sources)]
    looks = (_look(source, seed, *which) for source, *which in zip(sources, numbers, more))
    if all(source is None or source.has_no_effects for source in sources):
        with kept_generators():
            checksums = list(looks)
    else:
        # Failures of the process (it ends, hangs, or must not use the GPU) are ignored.
        checksums = load_aside(looks, LONGEST_S) or [{}] * len(sources)
    return [
        None if source is None else Fingerprint(source.length, samples)
        for source, samples in zip(sources, checksums)
    ]


def _spread(source: DataSource | None, count: int) -> list[int]:
    """Up to `count` sample numbers, including the first and the last."""
    if source is None or source.is_stream:
        return []
    last = len(source) - 1
    steps = min(count, len(source)) - 1
    return [0] if steps < 1 else [last * step // steps for step in range(steps + 1)]


def _common_indices(first: DataSource | None, second: DataSource | None) -> tuple[list[int], list[int]]:
    """Sample numbers, in each of two subsets of one data set, that refer to the same samples."""
    parts = [_root_of(source) for source in (first, second)]
    if any(part is None for part in parts):
        return [], []
    (root, indices), (other, others) = (part for part in parts if part is not None)
    if type(root) is not type(other) or len(root) != len(other):
        return [], []
    numbers_of = {index: number for number, index in enumerate(indices)}
    both = [(numbers_of[index], number) for number, index in enumerate(others) if index in numbers_of][:MANY]
    return [a for a, _ in both], [b for _, b in both]


def _root_of(source: DataSource | None) -> tuple[Any, list[int]] | None:
    """The data set of which a split is a subset, and the indices of its samples there."""
    dataset = None if source is None else source.dataset
    if not isinstance(dataset, Subset):
        return None
    indices = [int(index) for index in dataset.indices]
    while isinstance(dataset.dataset, Subset):
        dataset = dataset.dataset
        indices = [int(dataset.indices[index]) for index in indices]
    return (dataset.dataset, indices) if hasattr(dataset.dataset, "__len__") else None


def _look(source: DataSource | None, seed: int, few: Iterable[int], more: Iterable[int]) -> dict[int, int]:
    """Checksums of the samples; empty if samples differ when they are read again."""
    if source is None:
        return {}
    begun = time.monotonic()

    def read(numbers: Iterable[int], at_least: int = 2) -> Iterator[tuple[int, int]]:
        for position, number in enumerate(numbers):
            if position >= at_least and time.monotonic() - begun > LOOK_S:
                return
            try:
                yield number, checksum([source.sample(0, number, seed)])
            except Exception:  # training on it will raise the same error
                continue

    sums = dict(read(few))
    if dict(read(sums)).items() - sums.items():
        return {}
    more = list(more)
    for first in range(0, len(more), _AT_ONCE):
        if time.monotonic() - begun > LOOK_S:
            break
        numbers = more[first : first + _AT_ONCE]
        try:
            rows = source.stored_rows(numbers)
            found = None if rows is None else dict(zip(numbers, _checksums(rows)))
        except Exception:
            found = None
        sums |= dict(read(numbers, at_least=0)) if found is None else found
    return sums


def _checksums(rows: Sequence[Tensor]) -> list[int]:
    """For each sample what `checksum` gives for it: its parts are the rows of these tensors."""
    arrays = [as_array(each).reshape(len(each), -1) for each in rows]
    return [checksum(list(parts)) for parts in zip(*arrays, strict=True)]


def repeated_samples(train: Mapping[int, int], test: Mapping[int, int]) -> list[tuple[int, int]]:
    """Samples of the test split that are also in the training split, as (test, training) numbers.

    Empty if that is to be expected, because there are equal samples within a split.
    """
    of_train, of_test = Counter(train.values()), Counter(test.values())
    numbers_of = {value: number for number, value in train.items()}
    repeated = [(number, numbers_of[value]) for number, value in test.items() if value in numbers_of]
    if len(repeated) < 2:
        return []
    equal = sum(n * (n - 1) for count in (of_train, of_test) for n in count.values()) / 2
    pairs = sum(len(each) * (len(each) - 1) for each in (train, test)) / 2
    across = sum(n * of_train[value] for value, n in of_test.items())
    return repeated if across > 3 * equal / pairs * len(train) * len(test) else []
