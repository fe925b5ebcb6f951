"""The other workers of an averaging: which are live, how long to wait for them, and their messages."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from plait.comm.links.packing import Message
from plait.comm.running_clock import RunningClock
from plait.core.errors import LostPeer, PeerError
from plait.launch.membership import Memberships
from plait.schema.placement import WorkerLimits
from plait.sync.averaging.mailbox import Mailbox

FLUSH_S = 0.25
LOOK_S = 0.05
# A wait polls much more often than this; a longer gap means that this process was itself stopped.
LONGEST_LOOK_S = 1.0


class Presence(Protocol):
    """Which of the `members` of an averaging are live."""

    @property
    def members(self) -> tuple[int, ...]: ...

    def living(self) -> tuple[int, ...]:
        """The live members, including this one, in order."""

    def forget(self, member: int) -> None:
        """Record that the member has ended."""


class LivingMembers:
    """Live members according to the job's membership; `ranks` are the ranks of the members that average.

    A worker that is to leave is live until it does.
    """

    def __init__(self, memberships: Memberships, index: int, ranks: Sequence[int]) -> None:
        self._memberships = memberships
        self._index = index
        self._workers = [memberships.current.members[rank] for rank in ranks]
        self._gone: set[int] = set()
        self.members = tuple(range(len(ranks)))

    def living(self) -> tuple[int, ...]:
        lost = self._memberships.latest().lost
        return tuple(
            index
            for index, worker in enumerate(self._workers)
            if index == self._index or (worker not in lost and index not in self._gone)
        )

    def forget(self, member: int) -> None:
        self._gone.add(member)


@dataclass(frozen=True)
class Peers:
    """The job's store under a prefix, the mailbox to the other workers, and which of them are live.

    No wait for a live worker lasts longer than `timeout_s` without progress. A `tolerant` averaging leaves
    out workers that are not live; otherwise a worker that has ended is an error. `now` is this worker's
    clock; only differences of it are used.
    """

    store: dist.Store
    prefix: str
    mailbox: Mailbox
    presence: Presence
    timeout_s: float = WorkerLimits.timeout_s
    tolerant: bool = True
    now: Callable[[], float] = time.monotonic

    @property
    def rank(self) -> int:
        return self.mailbox.rank

    def ended(self) -> set[int]:
        """The workers that have ended."""
        return {peer for peer in self.mailbox.peers() if self.mailbox.is_gone(peer)}

    def living(self) -> set[int]:
        """The live workers, including this one."""
        ended = self.ended()
        for peer in ended:
            self.presence.forget(peer)
        return set(self.presence.living()) if self.tolerant else set(self.presence.members) - ended

    def is_there(self, peer: int) -> bool:
        """Whether to wait for a message of `peer`."""
        if not self.mailbox.is_gone(peer):
            return not self.tolerant or peer in self.presence.living()
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

    def flush(self) -> None:
        """Wait until sent messages have left this process: on a slow link they only do so while it polls.

        If some worker is not live, its messages may never leave, and are not waited for.
        """
        waited, started = self.stopwatch(), self.now()
        while not waited.is_over():
            begun = time.monotonic()
            self.mailbox.flush(LOOK_S)
            if time.monotonic() - begun < LOOK_S:
                return
            all_there = len(self.living()) == len(self.presence.members)
            if not all_there and self.now() - started > FLUSH_S:
                return


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

    def __init__(self, mailbox: Mailbox, channel: int) -> None:
        self._mailbox = mailbox
        self._channel = channel
        self._kept: dict[int, deque[Message]] = defaultdict(deque)

    def find(self, peer: int, number: int) -> Message | None:
        """Message `number` of `peer`, or None if it has not arrived."""
        kept = self._kept[peer]
        while (message := self._mailbox.take(peer, self._channel)) is not None:
            kept.append(message)
        while kept and kept[0].content.number < number:
            kept.popleft().release()
        return kept.popleft() if kept and kept[0].content.number == number else None

    def is_past(self, peer: int, number: int) -> bool:
        """Whether `find` has received later messages of `peer` than `number`."""
        kept = self._kept[peer]
        return bool(kept) and kept[0].content.number > number

    def drop_before(self, number: int) -> None:
        """Release messages of earlier numbers: a sender may have only a few unread messages."""
        for peer in self._mailbox.peers():
            if (message := self.find(peer, number)) is not None:
                self._kept[peer].appendleft(message)
