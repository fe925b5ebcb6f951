"""Gossip: a worker that is killed leaves the rest averaging, and nobody waits for it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from plait.sync.averaging import Peers
from plait.sync.gossip import ad_psgd, pair_averaging
from support.averaging import enter, job_store
from support.world import run_ranks


def die_or_gossip(rank: int, port: int, size: int, sync: str, victim: int) -> dict[str, Any]:
    """Drift apart and average; the victim is killed while its thread goes on answering and asking."""
    store, mail, presence = enter(rank, size, port, lease_s=0.5)
    weights = [torch.full((1000,), float(rank))]
    make = ad_psgd if sync == "ad-psgd" else pair_averaging
    gossip = make(Peers(store, "t", mail, presence), [lambda: weights], seed=0)
    end, longest, late = time.monotonic() + 1.0, 0.0, 0
    while time.monotonic() < end:
        time.sleep(0.01)
        if rank == victim and time.monotonic() > end - 0.7:
            os.kill(os.getpid(), signal.SIGKILL)
        weights[0].add_(0.01 * rank)
        started, before = time.monotonic(), gossip.tally.groups
        gossip.after_update()
        longest = max(longest, time.monotonic() - started)
        if time.monotonic() > end - 0.3:
            late += gossip.tally.groups - before
    members = gossip.settle()
    value = float(weights[0][0])
    gossip.close()
    return {"longest": longest, "late": late, "members": members, "value": value}


@pytest.mark.parametrize(("sync", "victim"), [("ad-psgd", 0), ("pair-averaging", 1)])
def test_a_killed_worker_leaves_the_rest_averaging(sync: str, victim: int):
    living = tuple(rank for rank in range(4) if rank != victim)
    with job_store() as port:
        found = run_ranks(4, die_or_gossip, port, 4, sync, victim, may_die=(victim,), deadline_s=20)
    for rank in living:
        assert found[rank]["members"] == living
        assert found[rank]["longest"] < 0.5
        # Averages go on after the kill.
        assert found[rank]["late"] > 0
    assert len({found[rank]["value"] for rank in living}) == 1
