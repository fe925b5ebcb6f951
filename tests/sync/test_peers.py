"""Waits and clocks of workers that average: time in which a worker was itself stopped does not count."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from plait.comm.links.packing import Content, Message
from plait.launcher.membership import Membership, Memberships
from plait.sync.averaging.peers import Inbox, Peers, SharedClock, WaitTimer, find_lost


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_a_stopwatch_is_over_when_nothing_happened_for_long_while_this_process_ran():
    clock = Clock()
    watch = WaitTimer(clock, 5.0)
    for _ in range(40):
        clock.now += 0.1
        assert not watch.is_over()
    # Stopped for an hour: the others had no chance.
    clock.now += 3600.0
    assert watch.is_over()
    watch.restart()
    clock.now += 3600.0
    assert not watch.is_over()
    for _ in range(39):
        clock.now += 0.1
        assert not watch.is_over()
    clock.now += 0.2
    assert watch.is_over()


def test_workers_whose_clocks_differ_share_one_time_once_they_exchanged_messages():
    clocks = [Clock(0.0), Clock(1e6), Clock(-30.0)]
    shared = []
    for clock in clocks:
        shared.append(SharedClock(clock))
        # They start one after the other.
        for each in clocks:
            each.now += 0.5
    for clock in shared:
        clock.observe(shared[0].time())
    times = [clock.time() for clock in shared]
    assert max(times) - min(times) < 1e-6
    # Who is ahead stays there: time never goes back.
    shared[1].observe(times[0] - 10.0)
    assert shared[1].time() == times[1]


def test_a_worker_that_is_to_leave_is_there_until_it_does_and_one_that_is_lost_is_not():
    memberships = Memberships(4)
    memberships.enter(Membership(2, (1, 4, 6), ("here",) * 3))
    mailbox: Any = ScriptedMail([], rank=1)
    peers = Peers(dist.HashStore(), "t", mailbox, find_lost(memberships, ranks=(0, 1, 2)))
    memberships.put(Membership(3, (4, 6), ("here",) * 2))
    assert peers.living() == {0, 1, 2}
    memberships.put(Membership(4, (4,), ("here",), lost=(6,)))
    assert peers.living() == {0, 1}
    mailbox.gone.add(0)
    assert peers.living() == {1}


class ScriptedMail:
    """Mail of three workers that has brought some numbers."""

    def __init__(self, numbers: list[int], rank: int = 0) -> None:
        self.rank, self.gone = rank, set[int]()
        self.released: list[int] = []
        self._messages = [
            Message(
                Content(number, (torch.zeros(1),), ""), lambda number=number: self.released.append(number)
            )
            for number in numbers
        ]

    def peers(self) -> list[int]:
        return [peer for peer in range(3) if peer != self.rank]

    def is_gone(self, peer: int) -> bool:
        return peer in self.gone

    def take(self, peer: int, channel: int) -> Message | None:
        return self._messages.pop(0) if peer == 1 and self._messages else None


def test_an_inbox_gives_the_number_asked_for_and_releases_what_came_too_late():
    mailbox: Any = ScriptedMail([3, 4, 6])
    inbox = Inbox(Peers(dist.HashStore(), "t", mailbox, set), 1)
    inbox.drop_before(4)
    assert mailbox.released == [3]
    message = inbox.find(1, 4)
    assert message is not None
    assert message.content.number == 4
    # Later messages came instead of it.
    assert inbox.receive(1, 5, 1.0, "to send") is None
    assert inbox.find(1, 6) is not None
    assert mailbox.released == [3]
