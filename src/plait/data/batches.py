"""From samples to batches: one split of a job's data, read, collated and checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from plait.core.errors import DataError
from plait.data.loader_processes import load_aside
from plait.data.sampler import mix
from plait.workloads.data import is_stream

Collate = Callable[[list[Any]], Any]

# What another process may take for one sample.
_ASIDE_S = 30.0
_EPOCHS_END = (
    "give it a __len__ with the samples that every epoch has: the stages of a pipeline must know where "
    "epochs end"
)
COLLATE_HINT = (
    "write a function that makes a batch of a list of samples, padding where it must, and name it: "
    "data.collate_fn: package.module:function (or make it the data set's collate_fn)"
)


class DataSource:
    """One split of a job's data: the data set, and how its samples become batches.

    A map-style set is read by index. A stream is read in its own order, where the number of a sample is its
    place in the epoch. With `model_loss` a batch may be a dict of the model's arguments alone.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None, model_loss: bool = False) -> None:
        self.dataset = dataset
        self.is_stream = is_stream(dataset)
        # Idle pools of loader processes, by their number of processes.
        self.idle_loaders: dict[int, list[Any]] = {}
        self._at_once = collate_fn is None and hasattr(dataset, "collated_batch")
        self._collate_fn = collate_fn or own_collate_fn(dataset)
        self._model_loss = model_loss
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
        """The samples of an epoch; None for a stream without `__len__` that was not read to its end yet."""
        if not self.is_stream:
            return len(self.dataset)
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError, AttributeError):
            return self._counted

    def note_length(self, samples: int) -> None:
        """Remember how many samples the stream gave until its end."""
        self._counted = samples

    def count(self, seed: int) -> int:
        """The samples of an epoch; a stream without `__len__` is read to its end once."""
        if self.length is None:
            self.note_length(sum(1 for _ in read_epoch(self.dataset, seed, 0)))
        return len(self)

    def batch(self, epoch: int, numbers: Sequence[int], seed: int) -> Any:
        """(inputs, target) of these samples of an epoch, or None of no sample."""
        if not numbers:
            return None
        self._set_epoch(epoch)
        if self._at_once:
            return self._arranged(self.dataset.collated_batch(list(numbers)))
        return self.collated(self._read(epoch, numbers, seed))

    def _set_epoch(self, epoch: int) -> None:
        """Say to a map-style set, and to what it is made of, which epoch it is read for; streams know."""
        if self.is_stream or epoch == self._epoch:
            return
        self._epoch = epoch
        for each in (*_within(self.dataset), self._collate_fn):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def collated(self, samples: list[Any]) -> Any:
        """(inputs, target) of a list of samples, or None of an empty one."""
        if not samples:
            return None
        if self._collate_fn is not None:
            return self._arranged(self._collate_fn(samples))
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError, ValueError, KeyError) as failure:
            raise DataError(_why_not_stacked(samples, failure)) from failure
        return self._arranged(batch)

    def first_batch(self, samples: int, seed: int) -> Any:
        """(inputs, target) of the first samples; a set that has fewer begins again."""
        if self.is_stream:
            return self.collated(self.first_samples(samples, seed))
        return self.batch(0, [i % len(self.dataset) for i in range(samples)], seed)

    def first_samples(self, count: int, seed: int) -> list[Any]:
        """The first samples of a stream; one that has fewer begins again.

        The stream is left as it is: it may count, or draw, as it is read.
        """
        found = load_aside(_first(self.dataset, count, seed), _ASIDE_S)
        # Read here where that cannot be done elsewhere.
        return list(_first(self.dataset, count, seed)) if found is None else found

    def example_batches(self, sizes: Sequence[int], seed: int) -> list[Any]:
        """Batches of these sizes, of further samples each; a set that has fewer begins again.

        A set whose batches are of unlike sizes may choose the samples, so that the batches show it.
        """
        if hasattr(self.dataset, "example_indices"):
            return [self.batch(0, numbers, seed) for numbers in self.dataset.example_indices(sizes)]
        count, begin, found = sum(sizes), 0, []
        samples = self.first_samples(count, seed) if self.is_stream else []
        for size in sizes:
            numbers = range(begin, begin + size)
            if self.is_stream:
                found.append(self.collated([samples[i] for i in numbers]))
            else:
                found.append(self.batch(0, [i % len(self.dataset) for i in numbers], seed))
            begin += size
        return found

    def own_order(self, seed: int, batch_size: int) -> Callable[[int], Sequence[int]] | None:
        """The shuffled order of an epoch's samples, of a data set that has its own; else None."""
        order: Callable[[int, int], Sequence[int]] | None = getattr(self.dataset, "epoch_order", None)
        return None if order is None else lambda epoch: order(mix(seed, epoch), batch_size)

    def _read(self, epoch: int, numbers: Sequence[int], seed: int) -> list[Any]:
        if self.is_stream:
            if self._reader is None:
                self._reader = StreamReader(self.dataset, seed)
            return self._reader.read(epoch, numbers, self.length)
        if hasattr(self.dataset, "__getitems__"):
            # What the batch is made of them with may draw at random, too.
            seed_all(mix(seed, epoch, numbers[-1]))
            before = random_states()
            samples = self.dataset.__getitems__(list(numbers))
            # Samples that draw at random are read one by one, each from its own seed.
            if same_states(before, random_states()):
                return _as_samples(samples, len(numbers))
        return [self.sample(epoch, number, seed) for number in numbers]

    def sample(self, epoch: int, number: int, seed: int) -> Any:
        """One sample of a map-style set, with the random choices that it has in that epoch."""
        seed_all(mix(seed, epoch, number))
        return self.dataset[number]

    def _arranged(self, batch: Any) -> tuple[Any, Any]:
        """The batch as inputs, in the form `forward` takes them, and target."""
        if self._model_loss and isinstance(batch, Mapping):
            arguments = _by_name(batch)
            return arguments, arguments.get("labels")
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(_not_a_pair(batch))
        inputs, target = batch
        if isinstance(inputs, Mapping):
            return _by_name(inputs), target
        return tuple(inputs) if isinstance(inputs, list) else inputs, target


def _within(dataset: Any) -> list[Any]:
    """A set, the sets that it takes its samples from, and their samplers."""
    found = [dataset]
    for each in found:
        held = [getattr(each, name, None) for name in ("sampler", "dataset")]
        parts = getattr(each, "datasets", None)
        held += parts if isinstance(parts, (list, tuple)) else []
        found += [part for part in held if part is not None and all(part is not known for known in found)]
    return found


def own_collate_fn(dataset: Any) -> Collate | None:
    """The data set's `collate_fn`, also that of a set of which this is a part."""
    while not hasattr(dataset, "collate_fn") and isinstance(dataset, Subset):
        dataset = dataset.dataset
    found: Collate | None = getattr(dataset, "collate_fn", None)
    return found


def _by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    # Sorted, because the stages of a pipeline match inputs by position.
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
    words = str(failure).strip().splitlines()
    why = f"{type(failure).__name__}: {words[0]}" if words else type(failure).__name__
    return f"data: the samples of a batch cannot be stacked ({why}); {COLLATE_HINT}"


def _as_samples(found: Any, count: int) -> list[Any]:
    if not isinstance(found, (list, tuple)) or len(found) != count:
        what = f"{len(found)} items" if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
        raise DataError(
            f"data.kind: __getitems__ gave {what} for {count} samples, expected a list of them; a data set "
            f"that makes whole batches has collated_batch(indices) instead"
        )
    return list(found)


def seed_all(number: int) -> None:
    """Let every source of random numbers that model and data code may use start from `number`."""
    # torch.manual_seed would note a stack trace for GPUs that nobody uses, a millisecond each time.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def random_states() -> tuple[Tensor, Any, Any]:
    """Where the random numbers of torch, Python and numpy stand."""
    return torch.default_generator.get_state(), random.getstate(), numpy.random.get_state(legacy=True)


def same_states(before: tuple[Tensor, Any, Any], after: tuple[Tensor, Any, Any]) -> bool:
    """Whether nothing was drawn between two calls of `random_states`."""
    (kind, keys, *rest), (kind_now, keys_now, *rest_now) = before[2], after[2]
    return (
        torch.equal(before[0], after[0])
        and before[1] == after[1]
        and (kind, rest) == (kind_now, rest_now)
        and bool((keys == keys_now).all())
    )


def read_epoch(dataset: Any, seed: int, epoch: int, begin: int = 0, state: Any = None) -> Iterator[Any]:
    """The samples of a stream's epoch from number `begin` on; without the `state` there, by skipping.

    Random generators are seeded before each sample, so a stream that draws from them gives every worker the
    same samples.
    """
    seed_all(mix(seed, epoch))
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    if state is not None:
        dataset.load_state_dict(state)
    number = 0 if state is None else begin
    samples = iter(dataset)
    while True:
        seed_all(mix(seed, epoch, number))
        try:
            sample = next(samples)
        except StopIteration:
            return
        if number >= begin:
            yield sample
        number += 1


def _first(dataset: Any, count: int, seed: int) -> Iterator[Any]:
    found = 0
    while found < count:
        before = found
        for _, sample in zip(range(count - before), read_epoch(dataset, seed, 0)):
            found += 1
            yield sample
        if found == before:
            raise DataError("data.kind: the stream ended before its first sample, expected one at least")


class StreamReader:
    """Reads samples of a stream by number, in increasing order within an epoch, and skips the others.

    An epoch of known `length` is read to its end: what the stream does after its last sample belongs to it,
    and one that gives more than that is an error.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = -1
        self._next = 0
        self._samples: Iterator[Any] = iter(())

    def read(self, epoch: int, numbers: Sequence[int], length: int | None) -> list[Any]:
        """These samples of an epoch; an epoch that ends before them is an error."""
        found = []
        for number in numbers:
            if epoch != self._epoch or number < self._next:
                self._read_to_end(length)  # others may have read the last samples
                self._samples = read_epoch(self._dataset, self._seed, epoch)
                self._epoch, self._next = epoch, 0
            found.append(self._skip_to(number, length))
        if self._next == length:
            self._read_to_end(length)
        return found

    def _read_to_end(self, length: int | None) -> None:
        """Let the stream end its epoch, where it is known that it does."""
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
        said = "its __len__ says" if hasattr(self._dataset, "__len__") else "it had"
        return f"{said} {length:,}"
