"""The other workers of an averaging: which are live, how long to wait for them, and their messages."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from plait.comm.links.packing import Message
from plait.comm.running_clock import RunningClock
from plait.core.errors import LostPeer, PeerError
from plait.launcher.membership import Memberships
from plait.schema.placement import WorkerLimits
from plait.sync.averaging.mailbox import Mailbox

LOOK_S = 0.05
# A wait polls much more often than this; a longer gap means that this process was itself stopped.
LONGEST_LOOK_S = 1.0


def find_lost(memberships: Memberships, ranks: Sequence[int]) -> Callable[[], set[int]]:
    """A function that returns which of the workers at `ranks` the job has lost, as indices in `ranks`.

    A worker that is to leave is not lost.
    """
    workers = [memberships.current.members[rank] for rank in ranks]
    return lambda: {index for index, worker in enumerate(workers) if worker in memberships.latest().lost}


@dataclass(frozen=True)
class Peers:
    """The job's store under a prefix, the mailbox to the other workers, and which of them are live.

    `find_lost` returns the workers that the job has lost; they never return. No wait for a live worker lasts
    longer than `timeout_s` without progress. A `tolerant` averaging leaves out workers that are not live;
    otherwise a worker that is gone is an error. `now` is this worker's clock; only differences of it are
    used.
    """

    store: dist.Store
    prefix: str
    mailbox: Mailbox
    find_lost: Callable[[], Collection[int]]
    timeout_s: float = WorkerLimits.timeout_s
    tolerant: bool = True
    now: Callable[[], float] = time.monotonic

    @property
    def rank(self) -> int:
        return self.mailbox.rank

    @property
    def members(self) -> tuple[int, ...]:
        """All workers, live or not, including this one."""
        return tuple(sorted([self.rank, *self.mailbox.peers()]))

    def living(self) -> set[int]:
        """The live workers, including this one."""
        lost = self.find_lost()
        gone = {peer for peer in self.mailbox.peers() if peer in lost or self.mailbox.is_gone(peer)}
        return set(self.members) - gone

    def is_there(self, peer: int) -> bool:
        """Whether to wait for a message of `peer`."""
        if peer not in self.find_lost() and not self.mailbox.is_gone(peer):
            return True
        if not self.tolerant:
            raise PeerError(
                f"worker {peer} is gone while worker {self.rank} averaged with it; look at the log of worker "
                f"{peer}",
                LostPeer.GONE,
                peer,
            )
        return False

    def stopwatch(self, factor: float = 1.0) -> WaitTimer:
        """A timer that expires after `factor` times `timeout_s` without a restart."""
        return WaitTimer(self.now, factor * self.timeout_s)

    def timed_out(self, waited: WaitTimer, who: Collection[int], what: str) -> PeerError:
        """The error of a wait for `who`; `what` says in the message what they did not do."""
        names = ", ".join(map(str, sorted(who)))
        return PeerError(
            f"worker {self.rank} waited {waited.limit_s:g} s for worker {names} {what}; it hangs, or is "
            f"slower than parallel.timeout_s allows",
            LostPeer.SILENT,
            min(who, default=None),
        )


class WaitTimer:
    """Measures the time since the last restart, without time in which this process was stopped."""

    def __init__(self, now: Callable[[], float], limit_s: float) -> None:
        self._clock = RunningClock(LONGEST_LOOK_S, now)
        self._since = 0.0
        self.limit_s = limit_s

    def restart(self) -> None:
        """Start again: there was progress."""
        self._since = self._clock.read()

    def is_over(self) -> bool:
        """Whether there was no progress for `limit_s`; called many times a second."""
        return self._clock.read() - self._since >= self.limit_s


class SharedClock:
    """A clock that all workers share, without comparing the clocks of their hosts.

    Every message carries the sender's time, and a receiver that is behind advances to it (Lamport's rule). So
    the clocks of two workers that exchange messages differ by at most the time of a message.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._offset = -now()

    def time(self) -> float:
        return self._now() + self._offset

    def observe(self, time: float) -> None:
        """Advance to `time`, which another worker's clock has reached."""
        self._offset = max(self._offset, time - self._now())


class Inbox:
    """The messages of one channel by sender and increasing number; older ones are released unread."""

    def __init__(self, peers: Peers, channel: int) -> None:
        self._peers = peers
        self._mailbox = peers.mailbox
        self._channel = channel
        self._kept: dict[int, deque[Message]] = defaultdict(deque)

    def find(self, peer: int, number: int) -> Message | None:
        """Message `number` of `peer`, or None if it has not arrived."""
        return self._kept[peer].popleft() if self.has(peer, number) else None

    def has(self, peer: int, number: int) -> bool:
        """Whether message `number` of `peer` has arrived."""
        kept = self._kept[peer]
        while (message := self._mailbox.take(peer, self._channel)) is not None:
            kept.append(message)
        while kept and kept[0].content.number < number:
            kept.popleft().release()
        return bool(kept) and kept[0].content.number == number

    def receive(self, peer: int, number: int, timeouts: float, what: str) -> Message | None:
        """Wait for message `number` of `peer`; None if it is not live, or has sent later messages instead.

        `what` says in the error after that many timeouts what the peer did not do.
        """
        waited = self._peers.stopwatch(timeouts)
        while True:
            if self.has(peer, number) or self._is_past(peer, number):
                return self.find(peer, number)
            if not self._peers.is_there(peer):
                # Messages that it sent before can still be received.
                self._mailbox.wait(0.0)
                return self.find(peer, number)
            if waited.is_over():
                raise self._peers.timed_out(waited, [peer], what)
            self._mailbox.wait(LOOK_S)

    def _is_past(self, peer: int, number: int) -> bool:
        """Whether `find` has received later messages of `peer` than `number`."""
        kept = self._kept[peer]
        return bool(kept) and kept[0].content.number > number

    def drop_before(self, number: int) -> None:
        """Release messages of earlier numbers: a sender may have only a few unread messages."""
        for peer in self._mailbox.peers():
            self.has(peer, number)
