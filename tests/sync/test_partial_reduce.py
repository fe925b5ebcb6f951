"""Partial reduce: nobody waits for a slow worker, and no worker's end or pause stops the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest
import torch

from plait.comm.tags import Tag
from plait.core.errors import PeerError
from support.averaging import closed_rounds, first_disconnected, job_store, partial_reduce
from support.world import run_ranks


def take_steps(
    rank: int, port: int, size: int, steps: int, step_s: list[float], elements: int = 1000, **rules: Any
) -> dict[str, Any]:
    """Sleep and average; each rank starts from its own number."""
    weights = [torch.full((elements,), float(rank), dtype=torch.float64), torch.tensor([float(rank)])]
    sync = partial_reduce(rank, size, port, weights, **rules)
    groups = []
    for _ in range(steps):
        time.sleep(step_s[rank])
        sync.after_update()
        groups.append(sync.last.members)
    sync.synchronize()
    same = weights[0].tolist()
    sync.close()
    return {
        "groups": groups,
        "value": same[0],
        "spread": max(same) - min(same),
        "waited_s": sync.stats.waited_s,
    }


def test_workers_that_wait_for_each_other_form_one_group_and_have_the_mean():
    with job_store() as port:
        found = run_ranks(4, take_steps, port, 4, 3, [0.05] * 4, minimum=4, patience=1000.0)
    for worker in found:
        assert worker["value"] == pytest.approx(1.5, abs=1e-12)
        assert worker["spread"] == 0.0
        assert sorted(worker["groups"][-1]) == [0, 1, 2, 3]


def test_workers_of_several_hosts_average_over_connections():
    with job_store() as port:
        found = run_ranks(3, take_steps, port, 3, 2, [0.1] * 3, elements=300_001, hosts=["a", "b", "a"])
    with job_store() as port:
        small = run_ranks(3, take_steps, port, 3, 2, [0.1] * 3, hosts=["a", "b", "c"])
    assert {(worker["value"], worker["spread"]) for worker in [*found, *small]} == {(1.0, 0.0)}


def test_large_tensors_are_averaged_by_several_owners():
    with job_store() as port:
        found = run_ranks(3, take_steps, port, 3, 1, [0.1] * 3, elements=300_001)
    assert {(worker["value"], worker["spread"]) for worker in found} == {(1.0, 0.0)}


# What a worker sends of a round, by who averages: the first to come, or several owners.
BY_THE_FIRST = (Tag.ROUND_UP, Tag.ROUND_DOWN)
BY_OWNERS = (Tag.GROUP_TO_OWNER, Tag.GROUP_FROM_OWNER)


def die_or_train(
    rank: int, port: int, size: int, how: str, elements: int, channels: tuple[int, ...]
) -> dict[str, Any]:
    """Rank 1 is killed or stopped in the middle of an average: it has joined, and gives nothing."""
    weights = [torch.full((elements,), float(rank))]
    groups: list[tuple[int, ...]] = []

    def leave(peer: int, channel: int) -> None:
        if rank == 1 and len(groups) >= 5 and channel in channels:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    sync = partial_reduce(rank, size, port, weights, lease_s=0.5, on_send=leave)
    # Longer than a lease, also where others hold the cores.
    for _ in range(75):
        time.sleep(0.02)
        sync.after_update()
        groups.append(sync.last.members)
    with pytest.raises(PeerError, match="worker 1 is gone"):
        sync.synchronize()
    sync.close()
    return {"groups": groups}


@pytest.mark.parametrize(
    ("how", "elements", "channels"), [("kill", 300_000, BY_OWNERS), ("stop", 10, BY_THE_FIRST)]
)
def test_a_worker_that_ends_or_stops_in_the_middle_of_an_average_leaves_the_rest_training(
    how: str, elements: int, channels: tuple[int, ...]
):
    with job_store() as port:
        found = run_ranks(3, die_or_train, port, 3, how, elements, channels, may_die=(1,), deadline_s=30)
    for rank in (0, 2):
        groups = found[rank]["groups"]
        assert len(groups) == 75
        # Once the lost one was in a group for the last time, the others go on with each other.
        last = max((place for place, group in enumerate(groups) if 1 in group), default=-1)
        assert last < 74
        assert [0, 2] in map(sorted, groups[last + 1 :])


def stop_for(seconds: float) -> None:
    """Stop this process, as a suspended host does; a child lets it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_at_sends(rank: int, port: int, size: int, stops: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Take steps; a worker is stopped right before its first message of a channel from some step on.

    `stops` are (step, rank, channel); rank 0 is the first to come to a round, and leads.
    """
    weights = [torch.full((300_000,), float(rank))]
    waiting = [(step, channel) for step, who, channel in stops if who == rank]
    steps = 0

    def stop(peer: int, channel: int) -> None:
        if waiting and steps >= waiting[0][0] and channel == waiting[0][1]:
            waiting.pop(0)
            stop_for(1.2)

    rules = {"minimum": size, "patience": 1000.0}
    sync = partial_reduce(rank, size, port, weights, lease_s=5.0, on_send=stop, **rules)
    while steps < 5:
        time.sleep(0.01 if rank == 0 else 0.03)
        sync.after_update()
        steps += 1
    sync.synchronize()
    sync.close()
    return {"value": float(weights[0][0]), "not stopped": waiting}


def test_stops_shorter_than_a_lease_in_the_middle_of_a_round_do_not_hang_it():
    stops = [(1, 0, Tag.ROUND_DOWN), (3, 2, Tag.GROUP_TO_OWNER)]
    with job_store() as port:
        found = run_ranks(3, stop_at_sends, port, 3, stops, deadline_s=25)
    for worker in found:
        assert worker == {"value": found[0]["value"], "not stopped": []}


def step_in_two_speeds(rank: int, port: int, size: int, every: int) -> None:
    weights = [torch.full((10,), float(rank))]
    sync = partial_reduce(rank, size, port, weights, every=every)
    # Two camps that would never meet by themselves: they step in turns.
    time.sleep(0.0 if rank < 2 else 0.05)
    for _ in range(18):
        time.sleep(0.1)
        sync.after_update()
    sync.synchronize()
    sync.close()


def test_two_camps_that_step_in_turns_stay_connected():
    with job_store() as port:
        run_ranks(4, step_in_two_speeds, port, 4, 4)
        groups = closed_rounds(port)
    assert len(groups) > 10
    assert any(len(group) < 4 for group in groups)
    # A worker that has taken its last step is in no later group.
    end = min(max(place for place, group in enumerate(groups) if rank in group) for rank in range(4))
    assert first_disconnected(groups[: end + 1], (0, 1, 2, 3), 4) is None
