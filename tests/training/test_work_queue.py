"""Claims: every share once, also when workers stop or are lost; equal workers leave each other nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.sampler import GlobalBatch, Position
from plait.training.engines.work_queue import WINDOW, Speed, WorkItem, WorkQueue, leaves_the_rest
from support.simulated import DictStore, SimulatedWorker, Simulation

ORDERS = st.integers(2, 6).flatmap(
    lambda workers: st.lists(st.permutations(range(workers)), min_size=8, max_size=20)
)


def batches(count: int, size: int = 6) -> list[tuple[GlobalBatch]]:
    return [
        (GlobalBatch(0, tuple(range(i * size, (i + 1) * size)), Position(0, (i + 1) * size)),)
        for i in range(count)
    ]


def make(store: Any, key: str, count: int, workers: int, **more: Any) -> list[WorkQueue]:
    """The claims of one segment as each worker sees them."""
    return [
        WorkQueue(store, key, batches(count), workers, place, workers, **more) for place in range(workers)
    ]


@given(ORDERS, st.integers(2, WINDOW))
def test_workers_in_lockstep_never_take_themselves_for_slow(orders: list[list[int]], window: int):
    """In each step every worker makes one claim, in any order; what is left counts for nothing here."""
    workers = len(orders[0])
    made = {
        worker: [step * workers + order.index(worker) for step, order in enumerate(orders)]
        for worker in orders[0]
    }
    for numbers in made.values():
        for first, last in zip(numbers, numbers[window:]):
            assert not leaves_the_rest(last - first, window, workers, lambda: 0)


@given(ORDERS, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_nor_do_they_over_several_segments_and_all_shares_are_taken(
    orders: list[list[int]], segments: list[int]
):
    workers = len(orders[0])
    speeds = [Speed() for _ in range(workers)]
    steps = iter(orders * 4)
    for number, count in enumerate(segments):
        store = DictStore()
        claims = [
            WorkQueue(store, f"c{number}", batches(count), workers, place, workers, speed=speeds[place])
            for place in range(workers)
        ]
        takers = [each.take() for each in claims]
        taken = [next(takers[place], None) for _ in range(count) for place in next(steps)]
        assert sorted(claim.number for claim in taken if claim) == list(range(count * workers))
        for each in claims:
            each.done()


def test_a_clearly_slower_worker_leaves_the_last_claims_to_the_others():
    # Seven make a claim in the time in which the eighth makes a quarter of one.
    assert leaves_the_rest(4 * 29, 4, 8, lambda: 20)
    assert not leaves_the_rest(4 * 29, 4, 8, lambda: 21)
    # Not clearly slower.
    assert not leaves_the_rest(4 * 12, 4, 8, lambda: 0)
    assert not leaves_the_rest(29, 1, 8, lambda: 0)


def run_at_own_pace(step_s: list[float], segments: list[int]) -> tuple[list[list[WorkItem]], float]:
    """What each worker took where worker i needs `step_s[i]` a claim, and when the last segment was over."""
    workers, now = len(step_s), 0.0
    speeds = [Speed() for _ in range(workers)]
    taken: list[list[WorkItem]] = [[] for _ in range(workers)]
    for number, count in enumerate(segments):
        store = DictStore()
        claims = [
            WorkQueue(store, f"c{number}", batches(count), workers, place, workers, speed=speeds[place])
            for place in range(workers)
        ]
        free = [(now, place, claims[place].take()) for place in range(workers)]
        while free:
            at, place, taker = free.pop(free.index(min(free, key=lambda each: each[:2])))
            claim = next(taker, None)
            now = max(now, at)
            if claim is not None:
                taken[place].append(claim)
                free.append((at + step_s[place], place, taker))
        assert not any(each.is_work_left() for each in claims)
        for each in claims:
            each.done()
    return taken, now


def test_a_slow_worker_is_known_from_earlier_segments_and_holds_up_no_later_one():
    segments = [10] * 6
    taken, ended = run_at_own_pace([0.1, 0.1, 0.1, 0.4], segments)
    assert sum(map(len, taken)) == 4 * sum(segments)
    # What four workers of these speeds take at best, and one step more at the end of each segment.
    best = 4 * sum(segments) / (3 / 0.1 + 1 / 0.4)
    assert ended < best + 0.1 * len(segments) + 0.4
    assert all(any(claim.index < 10 for claim in own) for own in taken)
    # It still takes its share of the work.
    assert len(taken[3]) > 0.5 * len(taken[0]) / 4


def test_a_worker_that_was_slow_and_is_no_more_takes_as_much_as_the_others():
    store, speed = DictStore(), Speed()
    for number in (0, 29, 58, 87, 116):
        speed.record(number)
    speed.end_segment(120)
    slow, other = (
        WorkQueue(store, "c", batches(20), 2, place, 2, speed=own)
        for place, own in enumerate([speed, Speed()])
    )
    takers = [slow.take(), other.take()]
    counts = Counter(place for _ in range(20) for place in (0, 1) if next(takers[place], None) is not None)
    assert counts == {0: 20, 1: 20}


class Interleaved(DictStore):
    """A store that lets others act right before one operation."""

    def __init__(self, operation: str, ending: str, act: Callable[[], None]) -> None:
        super().__init__(self._look)
        self._wanted, self._act = (operation, ending), act

    def _look(self, operation: str, key: str) -> None:
        if operation == self._wanted[0] and key.endswith(self._wanted[1]):
            self._wanted = ("", "")
            self._act()


@pytest.mark.parametrize("moment", [("check", "/stop"), ("get", "step/1"), ("compare_set", "/limit")])
def test_workers_with_equal_steps_stop_after_the_same_one_whenever_it_is_asked_for(moment: tuple[str, str]):
    """While one stops, the others go on as far as they can."""
    steps = [0, 0, 0]
    takers: list[Iterator[WorkItem]] = []

    def go_on() -> None:
        for place in (1, 2):
            for _ in range(5):
                steps[place] += next(takers[place], None) is not None

    store = Interleaved(*moment, go_on)
    claims = make(store, "c", 40, 3, fixed=True)
    takers += [each.take() for each in claims]
    for place in (0, 1, 2):
        steps[place] += next(takers[place]) is not None
    claims[0].stop()
    for place in (0, 1, 2):
        steps[place] += sum(1 for _ in takers[place])
    count = claims[0].done()
    assert steps == [count] * 3


def test_shares_that_a_slow_worker_left_are_taken_after_a_stop_before_they_count_as_done():
    store = DictStore()
    fast, slow = make(store, "c", 10, 2)
    taken = [next(fast.take()).number, next(slow.take()).number, next(fast.take()).number]
    # Share 3 belongs to the batch that was begun. Both go to synchronize: the one is slow, the other ended.
    fast.stop()
    assert [fast.is_work_left(), slow.is_work_left()] == [True, True]
    taken += [claim.number for claim in fast.take()]
    assert [fast.is_work_left(), slow.is_work_left()] == [False, False]
    assert taken == [0, 1, 2, 3]
    assert fast.done() == 2


def take_all(
    count: int, ahead: int, step_s: list[float], ended: list[int]
) -> Callable[[SimulatedWorker], None]:
    """Work as with loaders that read `ahead`; `ended` gets the claims that are done, of all workers."""

    def body(worker: SimulatedWorker) -> None:
        size = len(step_s)
        claims = WorkQueue(worker.store, "c", batches(count), size, worker.rank, size, ahead=True)

        def work(claim: WorkItem) -> None:
            worker.sleep(step_s[worker.rank])
            ended.append(claim.number)

        reserved: list[WorkItem] = []
        source = claims.take()
        while not claims.leaves():
            reserved += [claim for _ in range(ahead - len(reserved)) if (claim := next(source, None))]
            if not reserved:
                break
            if claims.begin(claim := reserved.pop(0)):
                work(claim)
        for claim in claims.take_over():
            work(claim)

    return body


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_what_loaders_hold_is_taken_over_from_a_lost_worker_all_but_one_share(seed: int, ahead: int):
    ended: list[int] = []
    world = Simulation(3, seed, stop_chance=0.01, stops_s=(3.0, 30.0), kill_chance=0.02)
    world.run(take_all(12, ahead, [0.1, 0.1, 0.4], ended))
    assert len(ended) == len(set(ended))
    lost = sum(worker.killed for worker in world.workers)
    assert 36 - lost <= len(ended) <= 36


def test_a_slow_worker_with_loaders_holds_up_nobody():
    world = Simulation(4, 0)
    ended: list[int] = []
    world.run(take_all(10, 6, [0.1, 0.1, 0.1, 2.0], ended))
    assert sorted(ended) == list(range(40))
    # Three take 38 of 40 in 1.3 s; the slow one is then at its second at most.
    assert world.now < 4.5


def test_keys_that_a_segment_leaves_are_listed_for_deletion():
    store = DictStore()
    for more in ({}, {"ahead": True}, {"fixed": True}):
        claims = make(store, "c", 3, 2, **more)
        for each in claims:
            for claim in each.take():
                each.begin(claim)
        claims[1].stop()
        for each in claims:
            each.is_work_left()
            each.done()
        for key in claims[0].store_keys():
            store.delete_key(key)
        assert not store.values
