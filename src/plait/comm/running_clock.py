"""A clock for timeouts of other processes that does not advance while this process is paused."""

from __future__ import annotations

import time
from collections.abc import Callable


class RunningClock:
    """A clock that advances at most `most_s` seconds between two readings.

    A process that is stopped, frozen with its container or blocked by a disk receives nothing meanwhile, and
    must not conclude that the others were silent. Read it more often than every `most_s` seconds.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._last = clock()
        self.now = 0.0  # at the last reading

    def read(self) -> float:
        """The time now."""
        last, self._last = self._last, self._clock()
        self.now += min(self._last - last, self._most_s)
        return self.now
