"""Times of a step on each worker: which workers are slow, and how fast the links are.

Work is what a worker does between two all-reduces: update, loading, forward and backward. The all-reduce then
waits for the slowest worker, so a worker's time in it beyond that wait is the time of the links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

# The minimum duration of an all-reduce, to avoid division by zero.
_LEAST_S = 1e-6


@dataclass(frozen=True)
class WorkerTimes:
    """Seconds of one step on each worker: of work, and in the all-reduce."""

    work_s: tuple[float, ...]
    sum_s: tuple[float, ...]

    @property
    def known(self) -> bool:
        """Whether every worker has timed the step; an interrupted worker reports 0."""
        return bool(self.work_s) and min(self.work_s) > 0

    @property
    def step_s(self) -> float:
        """The time from the end of one all-reduce to the end of the next, on the slowest worker."""
        return max(work + sum_ for work, sum_ in zip(self.work_s, self.sum_s))

    def link_s(self) -> tuple[float, ...]:
        """The seconds of each worker's all-reduce without waiting for slower workers."""
        slowest = max(self.work_s)
        return tuple(max(s - (slowest - w), _LEAST_S) for w, s in zip(self.work_s, self.sum_s))

    def link_bytes_per_s(self, size: int) -> tuple[float, ...]:
        """The throughput of an all-reduce of `size` bytes on each worker."""
        return tuple(size / seconds for seconds in self.link_s())


class StepTimer:
    """Times one worker's steps; call `pause` if something else happens between two steps.

    Examples:
        ```py
        timer = plait.StepTimer()
        loss.backward()
        timer.begin_sum()
        torch.distributed.all_reduce(gradients)
        timer.end_sum()
        ```
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark: float | None = None
        self._work_s = 0.0
        # The last step: seconds of work and in the all-reduce; zeros if unknown.
        self.last = (0.0, 0.0)

    def pause(self) -> None:
        """Do not count the time until the next all-reduce as work."""
        self._mark = None

    def begin_sum(self) -> None:
        """The worker's gradients are computed; it begins to sum them with the others."""
        now = self._clock()
        self._work_s = 0.0 if self._mark is None else now - self._mark
        self._mark = now

    def end_sum(self) -> None:
        """The sum is complete; `last` has the seconds of work and of summing."""
        assert self._mark is not None
        now = self._clock()
        self.last = (self._work_s, now - self._mark if self._work_s else 0.0)
        self._mark = now


def stragglers(work_s: Sequence[float], factor: float) -> tuple[int, ...]:
    """The workers that took more than `factor` times the median of all."""
    usual = median(work_s) if work_s else 0.0
    return tuple(worker for worker, seconds in enumerate(work_s) if seconds > factor * usual)


class Throughput:
    """Samples per second over the last `window` steps of a user's loop.

    Examples:
        ```python
        throughput = plait.Throughput()
        for _ in range(3):
            throughput.update(32)  # after each step, with its samples
        throughput.value
        ```
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._window = window
        self._ends = [clock()]
        self._samples: list[int] = []

    def update(self, samples: int) -> None:
        """Report the end of a step on `samples` samples."""
        self._ends = [*self._ends, self._clock()][-self._window - 1 :]
        self._samples = [*self._samples, samples][-self._window :]

    @property
    def value(self) -> float | None:
        """Samples per second; None before the first step."""
        seconds = self._ends[-1] - self._ends[0]
        return sum(self._samples) / seconds if self._samples and seconds > 0 else None
