"""`plait.DataLoader`: the same batches with any number of workers, and a loop that can go on anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import plait
from plait.core.errors import DataError, InputError
from support.further import but_further
from support.world import run_ranks

SAMPLES, BATCH = 23, 4  # six batches; the last has three samples


class Noisy:
    """Samples with noise from all three generators, which count the epochs that they are told of."""

    epoch = -1

    def __len__(self) -> int:
        return SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        if index >= SAMPLES:
            raise IndexError(index)
        return index, torch.rand(()).item() + random.random() + numpy.random.rand(), self.epoch


class SeedReader(Noisy):
    """Samples whose numbers depend on torch's seed, which they read and do not change."""

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        own = numpy.random.default_rng([torch.initial_seed() % 2**32, index])
        return index, own.random(), self.epoch


class SeveralSeedReaders(SeedReader):
    """The same, asked for several at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Forked(Noisy):
    """Samples that set all generators back to what they were before a draw."""

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        states = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng(devices=[]):
            drawn = super().__getitem__(index)
        random.setstate(states[0]), numpy.random.set_state(states[1])
        return drawn


class Cached(Noisy):
    """Samples that draw when they are read for the first time."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        if index not in self.known:
            self.known[index] = super().__getitem__(index)
        return self.known[index]  # type: ignore[no-any-return]


class Stream(IterableDataset[int]):
    """The numbers of an epoch, with `skip` out of `divide` left out."""

    def __init__(self, divide: int = 1, rank: int = 0) -> None:
        self.divide, self.rank = divide, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, SAMPLES, self.divide))


class Stateful(Stream):
    """The same, with a position of its own; counts what it reads."""

    at = read = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < SAMPLES:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


KINDS: dict[str, Any] = {
    "noisy": Noisy,
    "seed_reader": SeedReader,
    "several_seed_readers": SeveralSeedReaders,
    "forked": Forked,
    "cached": Cached,
    "stream": Stream,
    "stateful": Stateful,
}


def make_loader(kind: str, **changes: Any) -> plait.DataLoader:
    dataset = KINDS[kind]()
    return plait.DataLoader(dataset, BATCH, not isinstance(dataset, Stream), **{"seed": 5} | changes)


def rows(batch: Any) -> list[Any]:
    """The samples of a batch as plain values."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(zip(*(x.tolist() for x in batch)))


def read(
    rank: int, kind: str, epochs: int, state: Any = None, stop: int | None = None, **changes: Any
) -> tuple[list[list[Any]], Any]:
    """The batches of this worker until `epochs`, or `stop` of them, and the state after the last."""
    loader = make_loader(kind, **changes)
    if state is not None:
        loader.load_state_dict(state)
    seen: list[list[Any]] = []
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            assert loader.epoch == epoch
            seen.append(rows(batch))
            if len(seen) == stop:
                return seen, loader.state_dict()
    return seen, loader.state_dict()


def steps_of(shares: list[tuple[list[list[Any]], Any]]) -> list[list[Any]]:
    """The samples of each step over all workers."""
    assert len({len(seen) for seen, _ in shares}) == 1
    return [[row for part in parts for row in part] for parts in zip(*(seen for seen, _ in shares))]


@pytest.mark.parametrize("kind", but_further(("noisy", "stream", "stateful"), "stream"))
def test_a_run_goes_on_with_another_number_of_workers_as_if_it_had_not_stopped(kind: str):
    whole, end = read(0, kind, 2)
    assert [len(step) for step in whole] == [4, 4, 4, 4, 4, 3] * 2
    before = run_ranks(2, read, kind, 2, stop=3)
    assert steps_of(before) == whole[:3]
    # Two samples of the last batch for five workers: some have none.
    after = run_ranks(5, read, kind, 2, before[0][1], num_workers=1)
    assert steps_of(after) == whole[3:]
    assert all(state == end for _, state in after)
    assert read(0, kind, 2, before[1][1], num_workers=2)[0] == whole[3:]


def read_each(rank: int, kinds: list[str]) -> list[tuple[list[list[Any]], Any]]:
    """Two epochs of each kind, where the loop of each worker has another seed."""
    torch.manual_seed(rank + 1), random.seed(rank + 1), numpy.random.seed(rank + 1)
    return [read(rank, kind, 2) for kind in kinds]


def in_order(steps: list[list[Any]]) -> list[Any]:
    """All samples, by their numbers."""
    return sorted(row for step in steps for row in step)


def test_samples_that_read_a_seed_or_keep_their_draws_have_those_of_their_seed():
    kinds = ["seed_reader", "several_seed_readers", "forked", "cached"]
    shares = run_ranks(2, read_each, kinds)
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    for kind, of_kind in zip(kinds, zip(*shares)):
        steps, _ = read(0, kind, 2)
        first, second = (in_order(epoch) for epoch in (steps[:6], steps[6:]))
        assert len({value for _, value, _ in first}) == SAMPLES, kind
        if kind == "cached":  # each worker keeps its own in the second epoch
            assert first == in_order(steps_of(of_kind)[:6]) == in_order(read(0, "noisy", 1)[0])
        else:
            assert steps_of(of_kind) == steps, kind
            assert not {value for _, value, _ in first} & {value for _, value, _ in second}, kind


def test_a_state_counts_the_batches_that_the_loop_had_and_not_those_prepared_in_advance():
    whole, _ = read(0, "noisy", 1)
    for stop in (1, 5, 6):
        seen, state = read(0, "noisy", 1, stop=stop, num_workers=2)
        assert seen == whole[:stop]
        assert (state["epoch"], state["sample"]) == ((0, 4 * stop) if stop < 6 else (1, 0))
        assert read(0, "noisy", 1, state)[0] == whole[stop:]


def test_each_iteration_is_an_epoch_with_an_order_of_its_own():
    loader = make_loader("noisy")
    assert len(loader) == 6
    assert len(make_loader("noisy", drop_last=True)) == 5
    first = [rows(batch) for batch in loader]
    assert loader.epoch == 1
    second = next(iter(loader))
    assert sorted(row[0] for batch in first for row in batch) == list(range(SAMPLES))
    assert rows(second) != first[0]
    assert second[2].unique().tolist() == [1]  # the data set was told
    # As with torch's, an iteration that was left is not gone on with.
    assert next(iter(loader))[2].unique().tolist() == [2]
    loader.set_epoch(0)
    assert [rows(batch) for batch in loader] == first
    assert make_loader("noisy", seed=6).state_dict()["seed"] == 6


def test_set_epoch_of_a_loop_keeps_a_state_of_that_epoch():
    whole, _ = read(0, "noisy", 2)
    loader = make_loader("noisy")
    loader.load_state_dict(read(0, "noisy", 2, stop=8)[1])
    loader.set_epoch(1)
    assert [rows(batch) for batch in loader] == whole[8:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_leaves_the_generators_of_the_loop_as_they_are(num_workers: int):
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    wanted = torch.rand(()), random.random(), numpy.random.rand()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    assert len(list(make_loader("noisy", num_workers=num_workers))) == 6
    assert (torch.rand(()), random.random(), numpy.random.rand()) == wanted


def test_a_stream_with_a_state_is_not_read_again_from_its_beginning():
    _, state = read(0, "stateful", 1, stop=5)
    loader = make_loader("stateful")
    loader.load_state_dict(state)
    assert [rows(batch) for batch in loader] == [[20, 21, 22]]
    assert loader.dataset.read == 3  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="no __len__"):
        len(loader)


def test_a_sampler_draws_the_same_order_again():
    weights = [0.0] * 10 + [1.0] * (SAMPLES - 10)

    def loader() -> plait.DataLoader:
        return make_loader("noisy", sampler=WeightedRandomSampler(weights, 9))

    seen = [rows(batch) for batch in loader()]
    assert [len(step) for step in seen] == [4, 4, 1]
    assert len(loader()) == 3
    assert all(row[0] >= 10 for step in seen for row in step)
    assert [rows(batch) for batch in loader()] == seen
    other = loader()
    other.set_epoch(1)
    assert [rows(batch) for batch in other] != seen


class Rows(Dataset[Tensor]):
    """Samples by code of the user's."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number]


def with_noise(samples: list[Any]) -> Tensor:
    together = torch.stack([each[0] if isinstance(each, tuple) else each for each in samples])
    return together + torch.rand(len(samples)) + random.random() + numpy.random.rand()


def test_a_collate_function_draws_the_same_numbers_for_tensors_lists_and_other_sets():
    kept = torch.arange(10.0)
    sets: list[Any] = [Rows(kept), TensorDataset(kept), list(kept), Subset(TensorDataset(kept), range(10))]
    read = [torch.cat(list(plait.DataLoader(each, 4, collate_fn=with_noise))) for each in sets]
    assert all(torch.equal(each, read[0]) for each in read)


def test_batches_are_what_collate_fn_returns():
    words = ["a", "bc", "def"]
    loader = plait.DataLoader(words, 2, False, collate_fn="".join, num_workers=1)
    assert list(loader) == ["abc", "def"]
    named = plait.DataLoader([{"x": torch.ones(2), "name": "a"}] * 3, 3)
    (batch,) = named
    assert batch["x"].shape == (3, 2)
    assert batch["name"] == ["a"] * 3


class Failing(Noisy):
    def __getitem__(self, index: int) -> Any:
        raise OSError(f"no sample {index}")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_goes_wrong_is_said_in_the_words_of_the_loop(num_workers: int):
    unlike = plait.DataLoader([torch.ones(1), torch.ones(2)], 2, num_workers=num_workers)
    with pytest.raises(DataError, match=r"DataLoader: the samples .* cannot be stacked .*use collate_fn="):
        list(unlike)
    with pytest.raises(OSError, match="no sample"):
        list(plait.DataLoader(Failing(), 2, num_workers=num_workers))
    if num_workers:
        objects = plait.DataLoader([object()], 1, num_workers=1, collate_fn=lambda samples: samples[0])
        with pytest.raises(DataError, match=r"num_workers: .*or use num_workers=0"):
            list(objects)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Noisy(), {"batch_size": 0}, "batch_size: found 0"),
    (Noisy(), {"batch_size": True}, "batch_size: found True"),
    (Noisy(), {"batch_size": 2, "seed": "a"}, "seed: found 'a', expected a whole number"),
    (Noisy(), {"num_workers": -1}, "num_workers: found -1"),
    (Noisy(), {"batch_size": 24, "drop_last": True}, "an epoch has 23 samples"),
    (Noisy(), {"batch_sampler": [[0]]}, "batch_sampler is not taken: .*use batch_size="),
    (Noisy(), {"worker_init_fn": print}, "worker_init_fn is not taken: each sample has its own seed"),
    (Noisy(), {"sampler": DistributedSampler([0], 1, 0)}, "found a DistributedSampler"),
    (Noisy(), {"sampler": RandomSampler([0], generator=torch.Generator())}, "has its own generator"),
    (Noisy(), {"sampler": iter([0])}, "sampler has no __len__"),
    (TensorDataset(torch.ones(0, 2)), {}, "the data set is empty"),
    (Stream(), {}, "shuffle=False"),
    (torch.utils.data.DataLoader([0]), {}, "use loader.dataset"),
    (7, {}, "found 7, expected a data set"),
]


@pytest.mark.parametrize(("dataset", "changes", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_cannot_be_right_is_refused(dataset: Any, changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        plait.DataLoader(dataset, **{"batch_size": 4} | changes)


def test_a_misspelt_argument_has_a_hint():
    with pytest.raises(TypeError, match="'numworkers'; did you mean 'num_workers'"):
        plait.DataLoader(Noisy(), 4, numworkers=2)  # type: ignore[arg-type]


def test_a_state_of_another_data_set_or_of_something_else_is_refused():
    _, state = read(0, "noisy", 1, stop=2)
    loader = plait.DataLoader(range(9), 4)
    with pytest.raises(InputError, match=r"samples=23, but here it is 9: .*set_epoch\(1\)"):
        loader.load_state_dict(state)
    with pytest.raises(InputError, match="found a state with model, expected"):
        loader.load_state_dict({"model": 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        plait.DataLoader(range(9), 4, batchsize=3)  # type: ignore[call-arg]


def refusals(rank: int) -> list[str]:
    """What two workers that differ are told."""
    loader = plait.DataLoader(range(20), 4)
    if rank == 0:
        loader.load_state_dict(loader.state_dict() | {"sample": 8})
    different = [
        plait.DataLoader(range(10 + rank), 4),
        plait.DataLoader(range(20), 4 + rank),
        plait.DataLoader(Stream(2, rank), 4, shuffle=False),
        loader,
    ]
    texts = []
    for each in different:
        with pytest.raises(InputError) as failure:
            list(each)
        texts.append(str(failure.value))
    return texts


def test_workers_with_different_data_are_told_so():
    told = run_ranks(2, refusals)
    assert told[0] == told[1]
    length, batch_size, stream, state = told[0]
    assert "the length of the data set is 11 on rank 1, but 10 on rank 0" in length
    assert "batch_size is 5 on rank 1" in batch_size
    assert "DataLoader: worker 1 read other samples than worker 0" in stream
    assert "position in the epoch is 0 on rank 1, but 8 on rank 0" in state
