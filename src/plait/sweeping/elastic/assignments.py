"""Which worker trains which trials, and how many trials a worker returns for idle ones.

No I/O: the coordinator calls it with the requests and losses of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# An array that ends within this time is not divided: building another array takes a few seconds.
HAND_OVER_S = 5.0


class Assignments:
    """The trials of each worker; a trial has one worker at most."""

    def __init__(self) -> None:
        self._worker_of: dict[int, int] = {}
        self._idle: set[int] = set()

    def of(self, worker: int) -> list[int]:
        return [trial for trial, holder in self._worker_of.items() if holder == worker]

    def has(self, worker: int, trial: int) -> bool:
        """Whether `worker` trains the trial.

        A question of a lost worker may arrive late, when its trials belong to others.
        """
        return self._worker_of.get(trial) == worker

    def assign(self, worker: int, trials: Iterable[int]) -> None:
        """From now on `worker` trains these trials."""
        for trial in trials:
            assert self._worker_of.get(trial, worker) == worker, f"trial {trial} has a worker already"
            self._worker_of[trial] = worker
            self._idle.discard(worker)

    def release(self, trial: int) -> None:
        """No worker trains the trial any more: it ended, waits for others, or was returned."""
        self._worker_of.pop(trial, None)

    def lose(self, worker: int) -> list[int]:
        """A worker is lost; the trials that it had."""
        trials = self.of(worker)
        for trial in trials:
            self.release(trial)
        self._idle.discard(worker)
        return trials

    def set_idle(self, worker: int) -> None:
        """`worker` asked for trials, and none waited."""
        if not self.of(worker):
            self._idle.add(worker)

    def keep_idle(self, members: Iterable[int]) -> None:
        """Forget idle workers that are no members any more."""
        self._idle &= set(members)

    def is_idle(self, worker: int) -> bool:
        return worker in self._idle

    @property
    def idle(self) -> int:
        """How many workers wait for trials."""
        return len(self._idle)

    def may_take(self, worker: int) -> bool:
        """Whether trials that wait may go to `worker`: idle workers come first."""
        return not self._idle or worker in self._idle

    def to_hand_over(self, worker: int, left_s: float) -> int:
        """How many of its trials `worker`, whose array ends in `left_s`, must return for idle workers.

        The worker with the most trials divides them among the idle workers and itself.
        """
        if not self._idle or left_s < HAND_OVER_S:
            return 0
        counts = Counter(self._worker_of.values())
        if not counts or worker != max(counts, key=lambda each: (counts[each], -each)):
            return 0
        kept = -(-counts[worker] // (len(self._idle) + 1))
        return counts[worker] - kept
