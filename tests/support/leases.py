"""Who is there in tests without a supervisor: workers renew leases in a store, and see which have run out.

A lease distinguishes a slow worker from one that is stopped or cut off: a thread of its own renews it,
so that a long step keeps it and a stopped process loses it. No clocks are compared between workers, and the
time in which a worker or the store was itself paused counts against nobody.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

import torch.distributed as dist

from plait.comm.running_clock import RunningClock
from plait.core.errors import PeerError

BEATS = 5


class Leases:
    """This worker's lease and its view of the others'; all `members` make one with the same prefix.

    A member whose word has not changed for `lease_s` is absent until it speaks again.
    """

    def __init__(
        self, store: dist.Store, prefix: str, rank: int, members: Iterable[int], lease_s: float
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._lease_s = lease_s
        self.members = tuple(sorted(members))
        self._others = [member for member in self.members if member != rank]
        self._lock = threading.Lock()
        self._gone: set[int] = set()
        self._words: dict[int, bytes] = {}
        # It passes only while the store answers.
        self._clock = RunningClock(2 * lease_s / BEATS)
        self._last_seen_s = dict.fromkeys(self._others, 0.0)
        self._ended = threading.Event()
        self._store.set(self._key(rank), "0")
        self._thread = threading.Thread(target=self._beat, name="plait-presence", daemon=True)
        self._thread.start()

    def living(self) -> tuple[int, ...]:
        """The members that are there, this one among them, in order."""
        with self._lock:
            now = self._clock.now
            found = [
                other
                for other in self._others
                if other not in self._gone and now - self._last_seen_s[other] <= self._lease_s
            ]
        return tuple(sorted([self._rank, *found]))

    def lost(self) -> set[int]:
        """The members that are not there."""
        return set(self.members) - set(self.living())

    def close(self) -> None:
        """Give up the lease; the others learn at once."""
        self._ended.set()
        self._thread.join()
        self._store.set(self._key(self._rank), "ended")

    def _key(self, member: int) -> str:
        return f"{self._prefix}/lease/{member}"

    def _beat(self) -> None:
        # The store may end before a worker that does not give up its lease.
        with contextlib.suppress(PeerError):
            self._renew()

    def _renew(self) -> None:
        count = 0
        while not self._ended.wait(self._lease_s / BEATS):
            count += 1
            self._store.set(self._key(self._rank), str(count))
            words = {
                other: self._store.get(self._key(other))
                for other in self._others
                if self._store.check([self._key(other)])
            }
            self._take(words)

    def _take(self, words: dict[int, bytes]) -> None:
        with self._lock:
            now = self._clock.read()
            for other, word in words.items():
                if self._words.get(other) != word:
                    self._last_seen_s[other] = now
                self._words[other] = word
                if word == b"ended":
                    self._gone.add(other)
