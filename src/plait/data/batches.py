"""From samples to batches: one split of a job's data, read, collated and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from plait.core.errors import DataError
from plait.data.generators import kept_generators, looks, seed_sample
from plait.data.loader_processes import load_aside
from plait.data.seeding import mix, mix_further, seed_all
from plait.workloads.data import is_stream
from plait.workloads.data.stored import Images, Windows

Collate = Callable[[list[Any]], Any]

# The time limit of another process for one sample.
_ASIDE_S = 30.0
# How many samples are watched for draws, which takes about as long as to seed the generators.
_WATCHED = 64
# Sets whose samples run no code of the user's, which could read a seed or change something.
_STORED = (TensorDataset, list, Images, Windows)
_EPOCHS_END = (
    "give it a __len__ with the samples that every epoch has: the stages of a pipeline must know where "
    "epochs end"
)
COLLATE_HINT = (
    "write a function that makes a batch of a list of samples, padding where it must, and name it: "
    "data.collate_fn: package.module:function (or make it the data set's collate_fn)"
)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """The batch as inputs, in the form of forward's arguments, and target."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise DataError(_not_a_pair(batch))
    inputs, target = batch
    if isinstance(inputs, Mapping):
        return _by_name(inputs), target
    return tuple(inputs) if isinstance(inputs, list) else inputs, target


def as_arguments(batch: Any) -> tuple[Any, Any]:
    """The same for a model that computes its own loss: the batch may be a dict of only its arguments."""
    if not isinstance(batch, Mapping):
        return as_pair(batch)
    arguments = _by_name(batch)
    return arguments, arguments.get("labels")


class DataSource:
    """One split of a job's data: the data set, and how its samples become batches.

    A map-style set is read by index. A stream is read in its own order, and samples are numbered by their
    position in the epoch. `arrange` is applied to each collated batch.
    """

    def __init__(
        self, dataset: Any, collate_fn: Collate | None = None, arrange: Callable[[Any], Any] = as_pair
    ) -> None:
        self.dataset = dataset
        self.is_stream = is_stream(dataset)
        # Idle pools of loader processes, by their number of processes.
        self.idle_loaders: dict[int, list[Any]] = {}
        self._at_once = collate_fn is None and hasattr(dataset, "collated_batch")
        self._collate_fn = collate_fn or own_collate_fn(dataset)
        self._arrange = arrange
        self._several = hasattr(_innermost(dataset), "__getitems__")
        self._is_stored = type(_innermost(dataset)) in _STORED
        self._to_watch = _WATCHED
        self._draws = False
        self._reader: StreamReader | None = None
        self._counted: int | None = None
        self._epoch: int | None = None

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError("the stream has no __len__ and was not read to its end yet")
        return length

    @property
    def length(self) -> int | None:
        """The samples of an epoch; None for a stream without `__len__` that was not yet read to its end."""
        if not self.is_stream:
            return len(self.dataset)
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError, AttributeError):
            return self._counted

    def note_length(self, samples: int) -> None:
        """Record how many samples the stream has."""
        self._counted = samples

    def count(self, seed: int) -> int:
        """The number of samples of an epoch; a stream without `__len__` is read to its end once."""
        if self.length is None:
            self.note_length(sum(1 for _ in read_epoch(self.dataset, seed, 0)))
        return len(self)

    def batch(self, epoch: int, numbers: Sequence[int], seed: int) -> Any:
        """The batch of these samples of an epoch, (inputs, target), or None for no samples."""
        if not numbers:
            return None
        self._set_epoch(epoch)
        if self.is_stream:
            if self._reader is None:
                self._reader = StreamReader(self.dataset, seed)
            return self.collated(self._reader.read(epoch, numbers, self.length))
        with kept_generators():
            if self._at_once:
                return self._arrange(self.dataset.collated_batch(list(numbers)))
            # The collate function goes on with the numbers of the last sample.
            return self.collated(self._read(epoch, numbers, seed))

    @property
    def has_no_effects(self) -> bool:
        """Whether samples are read and collated without code of the user's, so that nothing else changes."""
        return self._is_stored and self._collate_fn is None

    @property
    def may_vary(self) -> bool:
        """Whether epochs may have other samples: the first drew random numbers, or it is told the epoch."""
        return self._draws or next(self._told_epochs(), None) is not None

    def _set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of a map-style set and of the sets within it."""
        if self.is_stream or epoch == self._epoch:
            return
        self._epoch = epoch
        for each in self._told_epochs():
            each.set_epoch(epoch)

    def _told_epochs(self) -> Iterator[Any]:
        return (each for each in (*_within(self.dataset), self._collate_fn) if hasattr(each, "set_epoch"))

    def collated(self, samples: list[Any]) -> Any:
        """(inputs, target) of a list of samples, or None for an empty list."""
        if not samples:
            return None
        if self._collate_fn is not None:
            return self._arrange(self._collate_fn(samples))
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError, ValueError, KeyError) as failure:
            raise DataError(_why_not_stacked(samples, failure)) from failure
        return self._arrange(batch)

    def first_batch(self, samples: int, seed: int) -> Any:
        """(inputs, target) of the first samples; a smaller set is repeated."""
        if self.is_stream:
            return self.collated(self.first_samples(samples, seed))
        return self.batch(0, [i % len(self.dataset) for i in range(samples)], seed)

    def first_samples(self, count: int, seed: int) -> list[Any]:
        """The first samples of a stream; a shorter stream is repeated.

        They are read in another process, as reading may change the stream's state.
        """
        samples = load_aside(_first(self.dataset, count, seed), _ASIDE_S)
        # Read here if another process cannot.
        return list(_first(self.dataset, count, seed)) if samples is None else samples

    def example_batches(self, sizes: Sequence[int], seed: int) -> list[Any]:
        """Consecutive batches of these sizes; a smaller set is repeated.

        A set whose batches vary in size may choose the samples, so that the batches show it.
        """
        if hasattr(self.dataset, "example_indices"):
            return [self.batch(0, numbers, seed) for numbers in self.dataset.example_indices(sizes)]
        count, begin, batches = sum(sizes), 0, []
        samples = self.first_samples(count, seed) if self.is_stream else []
        for size in sizes:
            numbers = range(begin, begin + size)
            if self.is_stream:
                batches.append(self.collated([samples[i] for i in numbers]))
            else:
                batches.append(self.batch(0, [i % len(self.dataset) for i in numbers], seed))
            begin += size
        return batches

    def own_order(self, seed: int, batch_size: int) -> Callable[[int], Sequence[int]] | None:
        """A function for the shuffled order of an epoch, if the data set defines its own; else None."""
        order: Callable[[int, int], Sequence[int]] | None = getattr(self.dataset, "epoch_order", None)
        return None if order is None else lambda epoch: order(mix(seed, epoch), batch_size)

    def _read(self, epoch: int, numbers: Sequence[int], seed: int) -> list[Any]:
        """Samples of a map-style set, one by one, or all at once if it can and they draw nothing."""
        if self._is_stored:
            seed_sample(mix(seed, epoch, numbers[-1]))
            return [self.dataset[number] for number in numbers]
        if self._several and not self._draws:
            # The same seed on all workers, whatever their share.
            seed_all(mix(seed, epoch))
            before = looks()
            samples = _as_samples(self.dataset.__getitems__(list(numbers)), len(numbers))
            if looks() == before:
                seed_sample(mix(seed, epoch, numbers[-1]))
                return samples
            self._draws = True
        before_number = mix_further(0, seed, epoch)
        return [self._seeded(number, mix_further(before_number, number) >> 1) for number in numbers]

    def stored_rows(self, numbers: Sequence[int]) -> tuple[Tensor, ...] | None:
        """What `sample` gives for each of these, as rows of tensors; None unless the set holds tensors."""
        if type(self.dataset) is TensorDataset:
            chosen = torch.tensor(numbers, dtype=torch.long)
            return tuple(tensor[chosen] for tensor in self.dataset.tensors)
        return self.dataset.collated_batch(list(numbers)) if type(self.dataset) in (Images, Windows) else None

    def sample(self, epoch: int, number: int, seed: int) -> Any:
        """One sample of a map-style set; all generators are seeded for it and that epoch."""
        return self._seeded(number, mix(seed, epoch, number))

    def _seeded(self, number: int, seed: int) -> Any:
        """One sample, for which all generators are seeded with `seed`.

        Those that it does not draw from, too: it may read a seed or a state.
        """
        seed_sample(seed)
        if self._draws or not self._to_watch:
            return self.dataset[number]
        before = looks()
        sample = self.dataset[number]
        self._draws, self._to_watch = looks() != before, self._to_watch - 1
        return sample


def _within(dataset: Any) -> list[Any]:
    """A set, the sets that it wraps, and their samplers."""
    sets = [dataset]
    for each in sets:
        held = [getattr(each, name, None) for name in ("sampler", "dataset")]
        parts = getattr(each, "datasets", None)
        held += parts if isinstance(parts, (list, tuple)) else []
        sets += [part for part in held if part is not None and all(part is not known for known in sets)]
    return sets


def _innermost(dataset: Any) -> Any:
    """The set that a `Subset`, which always has `__getitems__`, is a part of."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def own_collate_fn(dataset: Any) -> Collate | None:
    """The `collate_fn` of the data set, or of a set that it wraps."""
    while not hasattr(dataset, "collate_fn") and isinstance(dataset, Subset):
        dataset = dataset.dataset
    collate: Collate | None = getattr(dataset, "collate_fn", None)
    return collate


def _by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    # Sorted, as the stages of a pipeline match inputs by position.
    return {name: arguments[name] for name in sorted(arguments)}


def _not_a_pair(batch: Any) -> str:
    if isinstance(batch, Mapping):
        found, model = f"a {type(batch).__name__}", "; where the model computes its own loss, use loss: model"
    else:
        found = f"{len(batch)} items" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
        model = ""
    return (
        f"data.kind: the data set gave {found} a sample, expected (input, target); several inputs go into a "
        f"tuple, ((a, b), target), or a dict of the model's arguments{model}"
    )


def _why_not_stacked(samples: list[Any], failure: Exception) -> str:
    targets = [s[1] for s in samples if isinstance(s, (tuple, list)) and len(s) == 2]
    if any(target is None for target in targets):
        return (
            "data.kind: a sample's target is None, expected a tensor or a number; where the model computes "
            "its own loss, give a dict of its arguments and use loss: model"
        )
    lines = str(failure).strip().splitlines()
    why = f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
    return f"data: the samples of a batch cannot be stacked ({why}); {COLLATE_HINT}"


def _as_samples(returned: Any, count: int) -> list[Any]:
    if not isinstance(returned, (list, tuple)) or len(returned) != count:
        what = (
            f"{len(returned)} items"
            if isinstance(returned, (list, tuple))
            else f"a {type(returned).__name__}"
        )
        raise DataError(
            f"data.kind: __getitems__ gave {what} for {count} samples, expected a list of them; a data set "
            f"that makes whole batches has collated_batch(indices) instead"
        )
    return list(returned)


def read_epoch(dataset: Any, seed: int, epoch: int, begin: int = 0, state: Any = None) -> Iterator[Any]:
    """The samples of a stream's epoch from number `begin` on; without a `state`, earlier ones are skipped.

    Generators are seeded before each sample, so a stream that draws from them yields the same samples on
    every worker.
    """
    seed_all(mix(seed, epoch))
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    if state is not None:
        dataset.load_state_dict(state)
    number = 0 if state is None else begin
    samples = iter(dataset)
    while True:
        seed_sample(mix(seed, epoch, number))
        try:
            sample = next(samples)
        except StopIteration:
            return
        if number >= begin:
            yield sample
        number += 1


def _first(dataset: Any, count: int, seed: int) -> Iterator[Any]:
    count_read = 0
    while count_read < count:
        before = count_read
        for _, sample in zip(range(count - before), read_epoch(dataset, seed, 0)):
            count_read += 1
            yield sample
        if count_read == before:
            raise DataError("data.kind: the stream ended before its first sample, expected at least one")


class StreamReader:
    """Reads samples of a stream by number, in increasing order within an epoch, and skips the others.

    An epoch of known `length` is read to its end, so that code after the last sample runs; more samples than
    that are an error.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = -1
        self._next = 0
        self._samples: Iterator[Any] = iter(())

    def read(self, epoch: int, numbers: Sequence[int], length: int | None) -> list[Any]:
        """These samples of an epoch; an epoch that ends before them is an error."""
        samples = []
        for number in numbers:
            if epoch != self._epoch or number < self._next:
                self._read_to_end(length)  # other workers may have read the last samples
                self._samples = read_epoch(self._dataset, self._seed, epoch)
                self._epoch, self._next = epoch, 0
            samples.append(self._skip_to(number, length))
        if self._next == length:
            self._read_to_end(length)
        return samples

    def _read_to_end(self, length: int | None) -> None:
        """Read the stream to the end of its epoch, if its length is known."""
        for _ in self._samples if length is not None else ():
            self._next += 1
            if length is not None and self._next > length:
                raise DataError(
                    f"data.kind: the stream gave sample {self._next:,} in epoch {self._epoch}, but "
                    f"{self._expected(length)}; {_EPOCHS_END}"
                )

    def _skip_to(self, number: int, length: int | None) -> Any:
        while True:
            try:
                sample = next(self._samples)
            except StopIteration:
                raise DataError(
                    f"data.kind: the stream ended after {self._next:,} samples of epoch {self._epoch}, but "
                    f"{self._expected(length)}; {_EPOCHS_END}"
                ) from None
            self._next += 1
            if self._next > number:
                return sample

    def _expected(self, length: int | None) -> str:
        if length is None:
            return "more are due and it has no __len__"
        source = "its __len__ says" if hasattr(self._dataset, "__len__") else "it had"
        return f"{source} {length:,}"
