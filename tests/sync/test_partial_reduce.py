"""Partial reduce: nobody waits for a slow worker, and no worker's end or pause stops the rest."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from plait.sync.connectivity import first_disconnected
from support.averaging import closed_rounds, job_store, partial_reduce
from support.world import run_ranks


def take_steps(
    rank: int, port: int, size: int, steps: int, step_s: list[float], elements: int = 1000, **rules: Any
) -> dict[str, Any]:
    """Sleep and average; each rank starts from its own number."""
    weights = [torch.full((elements,), float(rank), dtype=torch.float64), torch.tensor([float(rank)])]
    sync = partial_reduce(rank, size, port, weights, **rules)
    started = time.monotonic()
    groups = []
    for _ in range(steps):
        time.sleep(step_s[rank])
        sync.after_update()
        groups.append(sync.last.members)
    seconds = time.monotonic() - started
    members = sync.settle()
    same = weights[0].tolist()
    sync.close()
    return {
        "seconds": seconds,
        "groups": groups,
        "members": members,
        "value": same[0],
        "spread": max(same) - min(same),
        "waited_s": sync.tally.waited_s,
    }


def test_workers_of_one_speed_form_one_group_and_have_the_mean():
    with job_store() as port:
        found = run_ranks(4, take_steps, port, 4, 3, [0.1] * 4)
    for worker in found:
        assert worker["members"] == (0, 1, 2, 3)
        assert worker["value"] == pytest.approx(1.5, abs=1e-12)
        assert worker["spread"] == 0.0
        assert sorted(worker["groups"][-1]) == [0, 1, 2, 3]


def test_workers_of_several_hosts_average_over_connections():
    with job_store() as port:
        found = run_ranks(3, take_steps, port, 3, 2, [0.1] * 3, elements=300_001, hosts=["a", "b", "a"])
    with job_store() as port:
        small = run_ranks(3, take_steps, port, 3, 2, [0.1] * 3, hosts=["a", "b", "c"])
    assert {(worker["value"], worker["spread"]) for worker in [*found, *small]} == {(1.0, 0.0)}


def test_a_late_worker_holds_nobody_up():
    with job_store() as port:
        found = run_ranks(4, take_steps, port, 4, 4, [0.1, 0.1, 0.1, 0.5])
    for worker in found[:3]:
        assert worker["seconds"] < 0.8
    assert len({worker["value"] for worker in found}) == 1


def test_large_tensors_are_averaged_by_several_owners():
    with job_store() as port:
        found = run_ranks(3, take_steps, port, 3, 1, [0.1] * 3, elements=300_001)
    assert {(worker["value"], worker["spread"]) for worker in found} == {(1.0, 0.0)}


def die_or_train(rank: int, port: int, size: int, how: str, elements: int, seconds: float) -> dict[str, Any]:
    """Rank 1 is killed or stopped in the middle of an average: it has joined, and gives nothing."""
    weights = [torch.full((elements,), float(rank))]
    sync = partial_reduce(rank, size, port, weights, lease_s=0.5)
    end = time.monotonic() + seconds
    groups: list[tuple[int, ...]] = []
    longest = 0.0

    def leave(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    while time.monotonic() < end:
        time.sleep(0.02)
        started = time.monotonic()
        if rank == 1 and len(groups) == 5:
            sync._mean.average = leave  # type: ignore[assignment, method-assign]
            sync._rounds._hand_out = leave  # type: ignore[method-assign]
            sync._mail.flush = leave  # type: ignore[method-assign]
        sync.after_update()
        longest = max(longest, time.monotonic() - started)
        groups.append(sync.last.members)
    members = sync.settle()
    value = float(weights[0][0])
    sync.close()
    return {"longest": longest, "members": members, "value": value, "groups": groups}


@pytest.mark.parametrize(("how", "elements"), [("kill", 300_000), ("stop", 10)])
def test_a_worker_that_ends_or_stops_in_the_middle_of_an_average_leaves_the_rest_training(
    how: str, elements: int
):
    with job_store() as port:
        found = run_ranks(3, die_or_train, port, 3, how, elements, 1.8, may_die=(1,), deadline_s=20)
    for rank in (0, 2):
        assert found[rank]["members"] == (0, 2)
        assert len(found[rank]["groups"]) > 15
        assert found[rank]["longest"] < 2.0
        # The very last may be alone: the other has gone to settle.
        assert [0, 2] in map(sorted, found[rank]["groups"][-5:])
    assert found[0]["value"] == found[2]["value"]


def step_in_two_speeds(rank: int, port: int, size: int, every: int) -> None:
    weights = [torch.full((10,), float(rank))]
    sync = partial_reduce(rank, size, port, weights, every=every)
    # Two camps that would never meet by themselves: they step in turns.
    end = time.monotonic() + 1.8
    time.sleep(0.0 if rank < 2 else 0.05)
    while time.monotonic() < end:
        time.sleep(0.1)
        sync.after_update()
    sync.settle()
    sync.close()


def test_two_camps_that_step_in_turns_stay_connected():
    with job_store() as port:
        run_ranks(4, step_in_two_speeds, port, 4, 4)
        groups = closed_rounds(port)
    assert len(groups) > 10
    assert any(len(group) < 4 for group in groups)
    assert first_disconnected(groups, (0, 1, 2, 3), 4) is None
