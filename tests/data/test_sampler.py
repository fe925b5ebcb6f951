"""Samples are a function of (seed, epoch, position): nothing is repeated or skipped, whatever changes."""

from __future__ import annotations

from itertools import islice

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data.loader import load
from plait.data.sampler import Position, batches, epoch_order, share, steps_per_epoch
from plait.data.seeding import mix

sizes = st.integers(1, 60)


def flow(start: Position, samples: int, size: int, keep_last: bool = True):
    return batches(start, samples, size, seed=3, shuffle=True, keep_last=keep_last)


@given(sizes, sizes, st.booleans())
def test_an_epoch_visits_every_sample_once(samples: int, size: int, shuffle: bool):
    steps = steps_per_epoch(samples, size, True)
    order = batches(Position(), samples, size, seed=1, shuffle=shuffle, keep_last=True)
    seen = [s for batch in islice(order, steps) for s in batch.samples]
    assert sorted(seen) == list(range(samples))


@given(sizes, sizes)
def test_dropping_the_last_batch_drops_only_what_does_not_fill_one(samples: int, size: int):
    steps = steps_per_epoch(samples, size, False)
    assert steps == samples // size
    got = list(islice(flow(Position(), samples, size, keep_last=False), steps)) if steps else []
    assert all(len(batch.samples) == size for batch in got)
    assert all(batch.epoch == 0 for batch in got)


@given(sizes, st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_changing_the_batch_size_at_any_step_keeps_the_stream_of_samples(samples: int, changes: list[int]):
    position, seen = Position(), []
    for size in changes:
        batch = next(flow(position, samples, size))
        seen += [(batch.epoch, s) for s in batch.samples]
        position = batch.after
    whole = ((e, s) for e in range(100) for s in epoch_order(3, e, samples, True))
    assert seen == list(islice(whole, len(seen)))


@given(sizes, st.integers(1, 9))
def test_the_shares_of_a_batch_are_the_batch_and_differ_by_one_at_most(count: int, workers: int):
    samples = tuple(range(count))
    shares = [share(samples, rank, workers) for rank in range(workers)]
    assert [s for part in shares for s in part] == list(samples)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch_order(seed, epoch, 50, True) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert len({mix(a, b) for a in range(30) for b in range(30)}) == 900


class Noisy:
    """A data set that augments: each sample draws random numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int):
        return torch.rand(2), torch.tensor(index)


def drawn(workers: int, loaders: int = 0) -> dict[tuple[int, int], list[float]]:
    found = {}
    for rank in range(workers):
        order = islice(flow(Position(), 20, 8), 6)
        for batch in load(Noisy(), order, seed=5, rank=rank, world_size=workers, loaders=loaders):
            for value, index in zip(*batch.content):
                found[batch.epoch, int(index)] = value.tolist()
    return found


def test_augmentation_depends_on_the_sample_and_epoch_not_on_the_workers_or_loaders():
    alone = drawn(1)
    assert drawn(3) == alone
    assert drawn(1, loaders=2) == alone
    assert alone[0, 7] != alone[1, 7]
