"""Which worker trains which trials, and which trials a worker hands over to idle ones.

Pure: the coordinator passes in what workers ask and what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterable

# An array that ends sooner is not divided: another worker needs a few seconds to make an array of its part.
HAND_OVER_S = 5.0


class Assignments:
    """The trials of each worker; a trial has one worker at most.

    A coordinator that takes over from another has to learn them: the `unconfirmed` workers may hold trials
    that it does not know of, and until they are lost or have confirmed theirs, nothing may be assigned.
    """

    def __init__(self, unconfirmed: Iterable[int] = ()) -> None:
        self._worker_of: dict[int, int] = {}
        self._unconfirmed = set(unconfirmed)
        self._idle: set[int] = set()

    @property
    def is_confirmed(self) -> bool:
        """Whether it is known which trials all workers hold."""
        return not self._unconfirmed

    @property
    def holders(self) -> list[int]:
        """The workers that hold trials, or may."""
        return sorted({*self._worker_of.values(), *self._unconfirmed})

    def of(self, worker: int) -> list[int]:
        return [trial for trial, holder in self._worker_of.items() if holder == worker]

    def has(self, worker: int, trial: int) -> bool:
        """Whether `worker` trains the trial.

        One that is lost may have asked something that is answered later: its trials are others' by then.
        """
        return self._worker_of.get(trial) == worker

    def assign(self, worker: int, trials: Iterable[int]) -> None:
        """From now on `worker` trains these trials."""
        for trial in trials:
            assert self._worker_of.get(trial, worker) == worker, f"trial {trial} has a worker already"
            self._worker_of[trial] = worker
            self._idle.discard(worker)

    def confirm(self, worker: int, trials: Iterable[int]) -> None:
        """`worker` holds these trials, and no others, from an earlier coordinator."""
        self._unconfirmed.discard(worker)
        self.assign(worker, trials)

    def release(self, trial: int) -> None:
        """No worker trains the trial any more: it ended, waits for others, or was handed back."""
        self._worker_of.pop(trial, None)

    def lose(self, worker: int) -> list[int]:
        """A worker is lost; the trials that it had."""
        trials = self.of(worker)
        for trial in trials:
            self.release(trial)
        self._unconfirmed.discard(worker)
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
        return self.is_confirmed and (not self._idle or worker in self._idle)

    def to_hand_over(self, worker: int, left_s: float) -> int:
        """How many of its trials `worker`, whose array ends in `left_s`, hands back for idle workers.

        The worker with the most trials divides them among the idle workers and itself.
        """
        if not self._idle or not self.is_confirmed or left_s < HAND_OVER_S:
            return 0
        counts = {holder: len(self.of(holder)) for holder in self.holders}
        if not counts or worker != max(counts, key=lambda each: (counts[each], -each)):
            return 0
        own_share = -(-counts[worker] // (len(self._idle) + 1))
        return counts[worker] - own_share
