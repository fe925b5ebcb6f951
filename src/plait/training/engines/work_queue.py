"""A shared work queue in the job's store: each worker claims its next share of a batch when it is ready.

Claim k is share k % workers of batch k // workers, so fast workers do more and every sample is used once per
epoch. With prefetching, a worker reserves claims before it begins them; the store records reservations, and
other workers may steal a claim until it is begun. So a lost worker costs at most one share.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from plait.data.loader import Batch, without_samples
from plait.data.sampler import GlobalBatch, share

# Added to the counter when no more batches may be begun.
STOPPED = 1 << 40
# A worker judges its speed by its last WINDOW steps, and is slow at SLOW times the usual time of one.
WINDOW = 4
# How often a worker that takes no work looks whether the interval has ended.
LOOK_S = 0.05
SLOW = 1.5


@dataclass(frozen=True)
class WorkItem:
    """One worker's work for one step: share `place` of the batches `index` of the interval.

    There is one batch of each stream; `weights` says which part of it the share is. `before` is the number of
    samples of the interval in claims before this one.
    """

    number: int
    index: int
    place: int
    batches: tuple[GlobalBatch, ...]
    weights: tuple[float, ...]
    before: int


def leaves_the_rest(passed: int, steps: int, workers: int, left: Callable[[], int]) -> bool:
    """Whether a worker stops claiming because it is slow, so that the others do not wait for it.

    All workers together made `passed` claims during its last `steps` steps, and `left` claims are left. A
    worker stops only if it is clearly slower than most, and the others finish the rest before it could finish
    one more.

    N workers in lockstep make one claim each per step, in any order. Then two claims of a worker that are
    `steps` steps apart differ by at most (steps + 1) N - 1, which from two steps on is less than 1.5 steps N:
    none is slow.
    """
    if steps < 2 or passed <= SLOW * steps * workers:
        return False
    # Compare with the extra claims that the others make during one of its steps.
    return max(left(), 0) * steps < passed - steps * workers


class Speed:
    """Counts the claims of all workers during the last few steps of this worker, over the whole run."""

    def __init__(self) -> None:
        self._numbers: deque[int] = deque(maxlen=WINDOW + 1)
        self._before = 0

    def record(self, number: int) -> None:
        """This worker begins claim `number` of the interval, counted over all workers."""
        self._numbers.append(self._before + number)

    def end_segment(self, claims: int) -> None:
        """End an interval that had `claims` claims when this worker stopped."""
        self._before += claims

    def leaves(self, workers: int, left: Callable[[], int]) -> bool:
        """Whether this worker stops taking work in this interval because it is slow."""
        steps = len(self._numbers) - 1
        if steps < WINDOW:
            return False
        return leaves_the_rest(self._numbers[-1] - self._numbers[0], steps, workers, left)


class WorkQueue:
    """The claims of one interval of a run; all workers create it with the same key and batches.

    A claim is a share of one step's batch that a worker computes. `batches` has for each step one batch of
    each stream: trials may read unlike data. `place` is the index of this worker among `places`, of which
    `workers` take claims. With `fixed`, it has the same share of every batch, so all take the same number of
    steps. With `ahead`, claims are reserved before they are begun.
    """

    def __init__(
        self,
        store: dist.Store,
        key: str,
        batches: Sequence[Sequence[GlobalBatch]],
        workers: int,
        place: int,
        places: int,
        *,
        fixed: bool = False,
        ahead: bool = False,
        speed: Speed | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._batches = batches
        self._before = [0, *itertools.accumulate(map(sample_count, batches))]
        self._workers = workers
        self._place = place
        self._places = places
        self._fixed = fixed
        self._ahead = ahead and not fixed
        self._speed = speed or Speed()
        self._taken = 0
        self._may_leave = True
        self._left_at: int | None = None
        self._asked = 0
        self._changes = 0
        self._has_stopped = False

    def take(self) -> Iterator[WorkItem]:
        """Claim work until none is left; with `ahead`, claims are only reserved."""
        while self._ahead or not self._leaves_now():
            if (number := self._next()) is None:
                return
            yield self._claim(number)

    def begin(self, claim: WorkItem) -> bool:
        """Begin a reserved claim; False if another worker has stolen it."""
        if not self._ahead:
            return True
        if not self._give_up(self._place, claim.number):
            return False
        self._record_begun(self._store.add(f"{self._key}/begun", 1) - 1)
        return True

    def leaves(self) -> bool:
        """Whether this worker stops because it is slow, with `ahead`: others steal its reservations."""
        return self._ahead and self._leaves_now()

    def take_over(self) -> Iterator[WorkItem]:
        """Steal claims that lost or slow workers have reserved and not begun.

        Each is begun at once; ends when no reservations are left.
        """
        while self._ahead and (number := self._take_one_over()) is not None:
            yield self._claim(number)

    def is_work_left(self) -> bool:
        """Whether claims are left after the workers synchronized; all workers call it."""
        if self._fixed:
            return False
        self._asked += 1
        count, limit = self._store.add(self._key, 0) % STOPPED, self._read_limit()
        left = count < (self._size if limit is None else limit) or any(self._held().values())
        agreed = self._store.compare_set(f"{self._key}/left/{self._asked}", "", str(int(left)))
        self._may_leave = False
        return bool(int(agreed))

    def stop(self) -> None:
        """Begin no further batch; batches that were begun are finished."""
        if self._has_stopped:
            return
        self._has_stopped = True
        if self._fixed:
            self._store.set(f"{self._key}/stop", "")
            self._agree_on_last()
        else:
            self._limit(self._store.add(self._key, STOPPED) % STOPPED)

    def end(self) -> None:
        """Let workers that only wait for the end of the interval know of it."""
        self._store.set(f"{self._key}/ended", "")

    def await_end(self, check: Callable[[], None]) -> None:
        """Wait until another worker has called `end`; an exception of `check` ends the wait."""
        while not self._store.check([f"{self._key}/ended"]):
            check()
            time.sleep(LOOK_S)

    def without_samples(self, number: int) -> tuple[WorkItem, list[Batch]]:
        """A claim without data, for workers of a pipeline other than the first, which reads the data."""
        item = self._claim(number)
        return item, [without_samples(batch) for batch in item.batches]

    def done(self) -> int:
        """How many batches were worked on; called once, when all workers are done."""
        limit = self._read_limit()
        count = len(self._batches) if limit is None else limit // self._workers
        self._speed.end_segment(count * self._workers if self._left_at is None else self._left_at)
        return count

    def store_keys(self) -> list[str]:
        """The keys in the store, to delete when no worker reads them any more."""
        names = ["/begun", "/limit", "/stop", "/ended", *(f"/left/{i + 1}" for i in range(self._asked))]
        names += [f"/{kind}/{place}" for kind in ("held", "step") for place in range(self._places)]
        return [self._key, *(f"{self._key}{name}" for name in names)]

    @property
    def _size(self) -> int:
        return len(self._batches) * self._workers

    def _claim(self, number: int) -> WorkItem:
        index, place = divmod(number, self._workers)
        batches = self._batches[index]
        shares = tuple(
            replace(batch, samples=tuple(share(batch.samples, place, self._workers))) for batch in batches
        )
        weights = tuple(len(own.samples) / len(batch.samples) for own, batch in zip(shares, batches))
        before = self._before[index] + sample_count(batches) * place // self._workers
        return WorkItem(number, index, place, shares, weights, before)

    def _leaves_now(self) -> bool:
        # At least one claim per interval: without any, it could not be seen that a worker is fast again.
        if not self._may_leave or not self._taken or self._fixed:
            return False
        count = f"{self._key}/begun" if self._ahead else self._key
        claimed = 0

        def left() -> int:
            nonlocal claimed
            claimed = self._store.add(count, 0) % STOPPED
            return self._size - claimed

        if self._speed.leaves(self._workers, left):
            self._left_at = claimed
            return True
        return False

    def _record_begun(self, number: int) -> None:
        self._taken += 1
        self._left_at = None
        self._speed.record(number)

    def _next(self) -> int | None:
        if self._fixed:
            return self._next_fixed()
        number = self._store.add(self._key, 1) - 1
        limit = self._size
        if number >= STOPPED:
            number %= STOPPED
            limit = self._limit(number)
        if number >= limit:
            return None
        if self._ahead:
            self._hold(number)
        else:
            self._record_begun(number)
        return number

    def _next_fixed(self) -> int | None:
        """The claim of this worker's next step; None if the interval ends before it.

        A worker announces a step before it checks for a stop, and a worker that stops reads the announcements
        afterwards. So either the step is still taken, or this worker sees the end.
        """
        step = self._taken
        self._store.set(f"{self._key}/step/{self._place}", str(step + 1))
        last = self._agree_on_last() if self._store.check([f"{self._key}/stop"]) else self._size
        self._taken += 1
        number = step * self._workers + self._place
        return number if number < last else None

    def _agree_on_last(self) -> int:
        """The end of the interval, after the last step that may have begun; any worker may set it."""
        keys = [f"{self._key}/step/{place}" for place in range(self._places)]
        furthest = max((int(self._store.get(key)) for key in keys if self._store.check([key])), default=0)
        return self._limit(furthest * self._workers)

    def _limit(self, claims: int) -> int:
        """The claim at which a stopped interval ends: the first caller rounds up to a whole batch."""
        whole = min(self._size, -(-claims // self._workers) * self._workers)
        return int(self._store.compare_set(f"{self._key}/limit", "", str(whole)))

    def _read_limit(self) -> int | None:
        key = f"{self._key}/limit"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def _held(self) -> dict[int, list[int]]:
        """The claims that each worker has reserved and not begun."""
        places = range(self._places) if self._ahead else ()
        return {place: _numbers(self._read_held(place)) for place in places}

    def _read_held(self, place: int) -> str:
        return self._store.compare_set(f"{self._key}/held/{place}", "", "none").decode()

    def _write_held(self, place: int, expected: str, numbers: Sequence[int]) -> bool:
        """Replace the reservations of a worker, if they are still as `expected`."""
        # The stamp distinguishes this change from the same one by another worker.
        self._changes += 1
        value = " ".join([f"{self._place}.{self._changes}", *map(str, numbers)])
        return self._store.compare_set(f"{self._key}/held/{place}", expected, value) == value.encode()

    def _hold(self, number: int) -> None:
        while True:
            before = self._read_held(self._place)
            if self._write_held(self._place, before, [*_numbers(before), number]):
                return

    def _give_up(self, place: int, number: int) -> bool:
        """Remove `number` from the reservations of a worker; whether this call removed it."""
        while number in (held := _numbers(before := self._read_held(place))):
            if self._write_held(place, before, [other for other in held if other != number]):
                return True
        return False

    def _take_one_over(self) -> int | None:
        """Steal the last reservation of the worker that has the most."""
        while any((held := self._held()).values()):
            place = max(held, key=lambda place: len(held[place]))
            if self._give_up(place, number := held[place][-1]):
                self._record_begun(self._store.add(f"{self._key}/begun", 1) - 1)
                return number
        return None


def sample_count(batches: Sequence[GlobalBatch]) -> int:
    """The samples of a step, of all streams."""
    return sum(len(batch.samples) for batch in batches)


def _numbers(held: str) -> list[int]:
    """The claims in a reservation record, after the stamp of the last change."""
    return [int(number) for number in held.split()[1:]]
