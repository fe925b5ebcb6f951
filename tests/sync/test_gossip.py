"""Gossip: a worker that is killed leaves the rest averaging, and nobody waits for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from plait.core.errors import PeerError
from plait.sync.averaging.base import AveragedState
from plait.sync.averaging.gossip import Gossip, ad_psgd, pair_averaging
from plait.sync.averaging.peers import Peers
from support.averaging import enter, job_store
from support.further import but_further
from support.world import run_ranks


def die_or_gossip(rank: int, port: int, size: int, sync: str, victim: int) -> None:
    """Drift apart and average; the victim is killed while its thread goes on answering and asking."""
    # With so long a lease, a worker that waits for the victim's to run out waits too long.
    store, mailbox, presence = enter(rank, size, port, lease_s=30.0)
    weights = [torch.full((1000,), float(rank))]
    make = ad_psgd if sync == "ad-psgd" else pair_averaging
    gossip = make(Peers(store, "t", mailbox, presence.lost), AveragedState([lambda: weights]), seed=0)

    def average(stage: str, others: Sequence[int]) -> None:
        """Update until all of `others` have had three averages more."""
        wanted = gossip.stats.groups + 3
        while not store.check([f"{stage}/{other}" for other in others]):
            time.sleep(0.01)
            weights[0].add_(0.01 * rank)
            gossip.after_update()
            if gossip.stats.groups >= wanted:
                store.set(f"{stage}/{rank}", "")

    average("all", range(size))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while not mailbox.is_gone(victim):
        gossip.after_update()
        time.sleep(0.01)
    average("rest", [other for other in range(size) if other != victim])
    with pytest.raises(PeerError, match=f"worker {victim} is gone"):
        gossip.synchronize()
    gossip.close()


def linked(port: int, size: int, make: Callable[[Peers, AveragedState], Gossip]) -> list[Gossip]:
    """Workers that gossip, all in this process; each starts from its own number."""

    def one(rank: int) -> Gossip:
        store, mailbox, presence = enter(rank, size, port, lease_s=5.0)
        weights = [torch.full((4,), float(rank))]
        return make(Peers(store, "t", mailbox, presence.lost), AveragedState([lambda: weights]))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def update_until(gossips: Sequence[Gossip], done: Callable[[], bool]) -> None:
    """Have the workers update until `done`; a wait that has no end fails."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "the workers do not average"
        for gossip in gossips:
            gossip.after_update()
        time.sleep(0.005)


@pytest.mark.parametrize("make", but_further((ad_psgd, pair_averaging), pair_averaging))
def test_who_asks_a_worker_that_has_not_yet_synchronized_goes_on_when_it_has(make: Any):
    with job_store() as port:
        first, second = linked(port, 2, lambda peers, averaged: make(peers, averaged, seed=0))
        # The first has synchronized and the second not yet; questions meet another number until it has.
        first.thread.pause()
        first.thread.resume()
        questions = first.thread.questions
        update_until([first], lambda: first.thread.questions > questions + 2)
        assert first.thread.averages == 0
        second.thread.pause()
        second.thread.resume()
        update_until([first, second], lambda: first.thread.averages > 2)
        for gossip in (first, second):
            gossip.close()


@pytest.mark.parametrize("graph", but_further(("complete", "ring"), "complete"))
def test_workers_of_even_place_average_among_themselves_when_all_others_are_lost(graph: str):
    weights: dict[int, list[torch.Tensor]] = {}

    def make(peers: Peers, averaged: AveragedState) -> Gossip:
        weights[peers.rank] = list(averaged.sources[0]())
        return ad_psgd(peers, averaged, seed=0, graph=graph)

    with job_store() as port:
        gossips = linked(port, 4, make)
        for lost in gossips[1::2]:
            lost.close()
        left = gossips[::2]
        before = [gossip.thread.averages for gossip in left]
        update_until(left, lambda: all(g.thread.averages > b + 2 for g, b in zip(left, before)))
        for gossip in left:
            gossip.close()
    # The mean of 0 and 2, also after the first of several averages; those of the lost workers have no part.
    assert [weights[rank][0].tolist() for rank in (0, 2)] == [[1.0] * 4] * 2


@pytest.mark.parametrize(
    ("sync", "victim"), [("ad-psgd", 0), pytest.param("pair-averaging", 1, marks=pytest.mark.extended)]
)
def test_a_killed_worker_leaves_the_rest_averaging_until_all_have_to(sync: str, victim: int):
    with job_store() as port:
        run_ranks(4, die_or_gossip, port, 4, sync, victim, may_die=(victim,))
