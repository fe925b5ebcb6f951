"""Times of a step on each worker: who was slow to compute, and how fast the links were.

Work is what a worker does between two sums of gradients: its update, loading, forward and backward. The sum
then waits for the slowest worker, so what a worker's sum took beyond that wait is the time of the links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

# A sum that took no time at all went at least this fast.
_LEAST_S = 1e-6


@dataclass(frozen=True)
class WorkerTimes:
    """Seconds of one step on each worker: at work, and in the sum that ended it."""

    work_s: tuple[float, ...]
    sum_s: tuple[float, ...]

    @property
    def known(self) -> bool:
        """Whether every worker has timed the step; one that was interrupted says 0."""
        return bool(self.work_s) and min(self.work_s) > 0

    @property
    def step_s(self) -> float:
        """From one sum's end to the next one's, on the slowest worker."""
        return max(work + sum_ for work, sum_ in zip(self.work_s, self.sum_s))

    def link_s(self) -> tuple[float, ...]:
        """The seconds that each worker's sum took without its wait for slower workers."""
        slowest = max(self.work_s)
        return tuple(max(s - (slowest - w), _LEAST_S) for w, s in zip(self.work_s, self.sum_s))

    def link_bytes_per_s(self, size: int) -> tuple[float, ...]:
        """The throughput of a sum of `size` bytes as each worker saw it."""
        return tuple(size / seconds for seconds in self.link_s())


class StepTimer:
    """Times one worker's steps: `pause` when other things come between two of them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark: float | None = None
        self._work_s = 0.0
        # Of the last step: seconds at work and in its sum; zeros where they are not known.
        self.last = (0.0, 0.0)

    def pause(self) -> None:
        """What comes before the next sum is not work of a step alone."""
        self._mark = None

    def begin_sum(self) -> None:
        now = self._clock()
        self._work_s = 0.0 if self._mark is None else now - self._mark
        self._mark = now

    def end_sum(self) -> None:
        assert self._mark is not None
        now = self._clock()
        self.last = (self._work_s, now - self._mark if self._work_s else 0.0)
        self._mark = now


def stragglers(work_s: Sequence[float], factor: float) -> tuple[int, ...]:
    """The workers that took more than `factor` times the median of all."""
    usual = median(work_s) if work_s else 0.0
    return tuple(worker for worker, seconds in enumerate(work_s) if seconds > factor * usual)


class Throughput:
    """Samples a second over the last `window` steps of a loop of one's own."""

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._window = window
        self._ends = [clock()]
        self._samples: list[int] = []

    def update(self, samples: int) -> None:
        """A step on that many samples has ended."""
        self._ends = [*self._ends, self._clock()][-self._window - 1 :]
        self._samples = [*self._samples, samples][-self._window :]

    @property
    def value(self) -> float | None:
        """Samples a second; None before the first step."""
        seconds = self._ends[-1] - self._ends[0]
        return sum(self._samples) / seconds if self._samples and seconds > 0 else None
