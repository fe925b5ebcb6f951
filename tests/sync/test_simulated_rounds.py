"""Partial reduce in a simulation: in whatever order workers run and are stopped, none waits for ever."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from plait.core.errors import LostPeer, PeerError
from plait.sync.averaging import group_mean, partial_reduce
from plait.sync.averaging.base import AveragedState
from plait.sync.averaging.partial_reduce import PartialReduce
from plait.sync.averaging.partial_reduce_rules import Arrival, Closed, NextStep, Open, Round, Rules, next_step
from plait.sync.averaging.peers import Peers
from support.further import but_further
from support.simulated import SimulatedWorker, Simulation, changed


@dataclass
class Story:
    """What one worker saw: each round with its weights before and after, when, and how all synchronized.

    `lost` is the error that ended its training, if all were to synchronize and one was lost.
    """

    rounds: list[tuple[Round, list[float], list[float]]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    synchronized: list[list[float]] = field(default_factory=list)
    lost: PeerError | None = None


def train(
    segments: int, steps: int, step_s: list[float], timeout_s: float = 60.0, **rules: Any
) -> Callable[[SimulatedWorker], Story]:
    """Steps of some length, each a change of the weights and an average; all synchronize after a segment."""

    def body(worker: SimulatedWorker) -> Story:
        peers = Peers(worker.store, "t", worker.mailbox, worker.presence.lost, timeout_s, now=worker.now)
        weights = [torch.arange(4, dtype=torch.float64) + 10 * worker.rank]
        sync = PartialReduce(peers, AveragedState([lambda: weights, lambda: ()]), Rules(**rules))
        story = Story()
        for _ in range(segments):
            for _ in range(steps):
                worker.sleep(step_s[worker.rank])
                weights[0].add_(1.0 + worker.rank)
                before = weights[0].tolist()
                sync.after_update()
                story.rounds.append((sync.last, before, weights[0].tolist()))
                story.times.append(worker.simulation.now)
            try:
                sync.synchronize()
            except PeerError as failure:
                if failure.kind is not LostPeer.GONE:
                    raise
                story.lost = failure
                break
            story.synchronized.append(weights[0].tolist())
        assert worker.mailbox.refused == 0
        return story

    return body


@contextlib.contextmanager
def model_of(size: str) -> Iterator[None]:
    """Models of which the leader averages all, and of which every member averages a part."""
    small = partial_reduce.SMALL_BYTES if size == "small" else 0
    with changed(partial_reduce, SMALL_BYTES=small), changed(group_mean, LEAST_BYTES=8):
        yield


def check_that_all_synchronized_alike(stories: list[Story | None]) -> None:
    """All have the same weights each time; those that have not know that a worker is lost."""
    reported = [story for story in stories if story is not None]
    for time in itertools.zip_longest(*(story.synchronized for story in reported)):
        assert len({tuple(weights) for weights in time if weights is not None}) == 1
    for story in reported:
        assert len(story.synchronized) == 2 or story.lost is not None


@pytest.mark.parametrize("size", but_further(("small", "large"), "small"))
def test_workers_that_are_stopped_or_killed_at_any_moment_hold_nobody_up_for_ever(size: str):
    with model_of(size):
        for seed in range(8):
            world = Simulation(
                3,
                seed,
                stop_chance=0.01,
                stops_s=(0.5, 2.0, 4.0, 6.0, 20.0),
                kill_chance=0.001 if seed % 2 else 0.0,
            )
            stories = world.run(train(2, 6, [0.1, 0.1, 0.13], every=3))
            assert sum(story is None for story in stories) <= 1
            check_that_all_synchronized_alike(stories)


@pytest.mark.parametrize("size", but_further(("small", "large"), "small"))
def test_after_stops_shorter_than_a_lease_every_member_has_the_mean_of_all_members(size: str):
    with model_of(size):
        for seed in range(6):
            world = Simulation(3, seed, lease_s=15.0, stop_chance=0.02, stops_s=(0.5, 1.5, 2.5))
            stories = world.run(train(2, 5, [0.1, 0.1, 0.13]))
            check_that_all_synchronized_alike(stories)
            assert all(story.lost is None for story in stories)
            check_means(stories)


def check_means(stories: list[Story]) -> None:
    """Every member that a round has took part in it, and left with the mean of what the members brought."""
    by_round: dict[int, dict[int, tuple[Round, list[float], list[float]]]] = defaultdict(dict)
    for rank, story in enumerate(stories):
        for seen in story.rounds:
            by_round[seen[0].number][rank] = seen
    for found in by_round.values():
        members = {tuple(sorted(round_.members)) for round_, _, _ in found.values()}
        assert members == {tuple(sorted(found))}
        (behind,) = {round_.behind for round_, _, _ in found.values()}
        brought = [before for rank, (_, before, _) in found.items() if rank not in behind]
        mean = torch.tensor(brought, dtype=torch.float64).mean(0)
        for _, _, after in found.values():
            assert torch.allclose(torch.tensor(after, dtype=torch.float64), mean, rtol=0, atol=1e-12)


def test_an_answer_that_takes_seconds_on_a_slow_link_is_waited_for():
    world = Simulation(3, 0, message_s=(2.0, 3.0))
    stories = world.run(train(1, 4, [0.1] * 3))
    check_means(stories)
    assert any(len(round_.members) > 1 for story in stories for round_, _, _ in story.rounds)


def test_clocks_that_differ_between_hosts_make_no_difference_to_groups():
    sizes = []
    for skews in ([0.0] * 4, [0.0, 0.5, -30.0, 1e6]):
        found = []
        for seed in range(3):
            stories = Simulation(4, seed, skews_s=skews).run(train(1, 12, [0.1] * 4))
            found += [len(round_.members) for story in stories for round_, _, _ in story.rounds]
        sizes.append(sum(found) / len(found))
    # Workers of one speed: groups of nearly all, however wrong their clocks are.
    assert sizes[0] > 3.5
    assert sizes[1] > 3.5


def test_workers_of_one_speed_form_one_group_and_a_late_one_holds_nobody_up():
    stories = Simulation(4, 0).run(train(1, 10, [0.1, 0.1, 0.1, 0.5], every=1000))
    check_means(stories)
    for story in stories[:3]:
        groups = [round_.members for round_, _, _ in story.rounds]
        assert sum(set(group) >= {0, 1, 2} for group in groups) >= 8
        # At first nobody knows that the fourth is slow; it is waited for once, for a step.
        assert story.times[-1] < 10 * 0.12 + 0.1
    assert stories[3].times[-1] > 10 * 0.5


def hang(worker: SimulatedWorker) -> Story:
    """The last worker stays where it is after a few steps; its lease goes on."""
    if worker.rank == 2:
        send = worker.mailbox.send

        def send_or_hang(peer: int, channel: int, number: int, *given: Any) -> bool:
            if number == 4:
                worker.sleep(1000.0)
            return bool(send(peer, channel, number, *given))

        worker.mailbox.send = send_or_hang
    return train(1, 10, [0.1] * 3, timeout_s=6.0, minimum=3, patience=100.0)(worker)


@pytest.mark.parametrize("size", but_further(("small", "large"), "large"))
def test_a_wait_for_a_worker_that_hangs_ends_and_names_it(size: str):
    words = r"waited (6|12) s for worker 2 to .* or is slower than parallel.timeout_s allows"
    for seed in range(4):
        with model_of(size), pytest.raises(PeerError, match=words):
            Simulation(3, seed).run(hang)


def test_who_joined_a_round_obeys_its_outcome():
    entries = (Arrival(0, -1, 0.1, 0.0), Arrival(1, 3, 0.1, 0.0))
    opened, closed = Open(entries), Closed(Round(4, (0, 1)))
    others = Closed(Round(4, (0, 2)))

    def step(
        outcome: Any, *, brings_mean: bool = True, there: bool = True, too_long: bool = False
    ) -> NextStep:
        return next_step(outcome, 1, brings_mean, there, too_long)

    assert step(opened) is NextStep.WAIT
    assert step(opened, there=False) is step(opened, too_long=True) is NextStep.MAKE_VOID
    for there in (True, False):
        for too_long in (True, False):
            assert step(None, there=there, too_long=too_long) is NextStep.GO_ON
            assert step(others, there=there, too_long=too_long) is NextStep.GO_ON
            assert step(closed, brings_mean=False, there=there, too_long=too_long) is NextStep.TAKE_PART
    assert step(closed) is NextStep.WAIT
    assert step(closed, there=False) is NextStep.LEAVE
    assert step(closed, too_long=True) is NextStep.COMPLAIN
