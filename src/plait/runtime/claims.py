"""Work that workers take as they can: claims on shares of batches, counted in the job's store.

Claim k is share k % workers of batch k // workers, so fast workers do more and every sample is used once an
epoch. What a worker had claimed when it was lost is lost with it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from plait.runtime.sampling import GlobalBatch, Position, share

# Added to the count to say that no more batches are begun.
STOPPED = 1 << 40


@dataclass(frozen=True)
class Claim:
    """One worker's work for one step: share `place` of batch `index`, counted from the segment's first.

    `before` counts the samples of the segment in claims before this one.
    """

    index: int
    place: int
    batch: GlobalBatch
    before: int


class Claims:
    """The claims of one segment of a run; all workers make one with the same key and batches.

    With `fixed`, worker `fixed` has the same share of every batch instead, so all take equally many steps.
    """

    def __init__(
        self,
        store: dist.Store,
        key: str,
        batches: Sequence[GlobalBatch],
        workers: int,
        fixed: int | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._batches = batches
        self._before = [0, *itertools.accumulate(len(batch.samples) for batch in batches)]
        self._workers = workers
        self._fixed = fixed
        self._taken = 0
        self._speed = _Speed()
        self._may_leave = True
        self._asked = 0

    def take(self) -> Iterator[Claim]:
        """Claims for this worker, until none is left."""
        while (number := self._next()) is not None:
            index, place = divmod(number, self._workers)
            batch = self._batches[index]
            own = tuple(share(batch.samples, place, self._workers))
            before = self._before[index] + len(batch.samples) * place // self._workers
            yield Claim(index, place, GlobalBatch(batch.epoch, own, batch.after), before)

    def is_work_left(self) -> bool:
        """Whether all went to settle and left claims behind, which are to be taken now; all workers ask."""
        if self._fixed is not None:
            return False
        self._asked += 1
        left = self._store.add(self._key, 0) < self._size
        agreed = self._store.compare_set(f"{self._key}/left/{self._asked}", "", str(int(left)))
        self._may_leave = False
        return bool(int(agreed))

    def stop(self) -> None:
        """Let no further batch be begun; those that were are finished."""
        if self._fixed is None:
            self._limit(self._store.add(self._key, STOPPED) % STOPPED)
            return
        furthest = self._taken
        while self._store.check([f"{self._key}/{furthest}"]):
            furthest += 1
        # Whoever is furthest may begin one more step before it hears of the limit.
        self._limit((furthest + 2) * self._workers)

    def done(self) -> tuple[int, Position | None]:
        """How many batches were taken up, and the position after them; asked once all workers are through."""
        limit = self._read_limit()
        count = len(self._batches) if limit is None else limit // self._workers
        return count, self._batches[count - 1].after if count else None

    def stopped(self) -> bool:
        """Whether someone stopped it; asked once all workers are through."""
        return self._read_limit() is not None

    @property
    def _size(self) -> int:
        return len(self._batches) * self._workers

    def _next(self) -> int | None:
        if self._fixed is not None:
            return self._next_fixed(self._fixed)
        if self._may_leave and self._speed.leaves_the_rest(
            self._workers, lambda: self._size - self._store.add(self._key, 0)
        ):
            return None
        number = self._store.add(self._key, 1) - 1
        self._speed.note(number)
        if number < STOPPED:
            return number if number < self._size else None
        number %= STOPPED
        return number if number < self._limit(number) else None

    def _next_fixed(self, place: int) -> int | None:
        number = self._taken * self._workers + place
        self._store.set(f"{self._key}/{self._taken}", "")
        limit = self._read_limit()
        self._taken += 1
        return number if number < (self._size if limit is None else limit) else None

    def _limit(self, given: int) -> int:
        """The claim at which the segment ends, once stopped: the first to ask rounds up to a whole batch."""
        whole = min(self._size, -(-given // self._workers) * self._workers)
        return int(self._store.compare_set(f"{self._key}/limit", "", str(whole)))

    def _read_limit(self) -> int | None:
        key = f"{self._key}/limit"
        return int(self._store.get(key)) if self._store.check([key]) else None


class _Speed:
    """How fast this worker takes claims, and how fast all do together."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._own_s = 0.0
        self._each_s = 0.0

    def note(self, number: int) -> None:
        """Note that this worker claims `number` now."""
        now = time.monotonic()
        if self._last is not None:
            took, since = now - self._last[0], number - self._last[1]
            self._own_s, self._each_s = took, took / max(since, 1)
        self._last = (now, number)

    def leaves_the_rest(self, workers: int, left: Callable[[], int]) -> bool:
        """Whether the others are through with what is `left` before this worker would be with one claim.

        Only one that is clearly slower than most asks; so the last claims hold nobody up.
        """
        usual_s = self._each_s * workers
        if self._own_s <= 1.5 * usual_s:
            return False
        return max(left(), 0) * self._each_s < self._own_s - usual_s
