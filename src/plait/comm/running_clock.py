"""A clock for those who judge others by their silence: it stands still while the judge itself is paused."""

from __future__ import annotations

import time
from collections.abc import Callable


class RunningClock:
    """The seconds in which this process came to look at others.

    A process that is stopped, frozen with its container or held up by a disk hears nobody meanwhile, and must
    not take that for their silence: between two readings at most `most_s` seconds pass. Whoever uses it reads
    it more often than that.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._last = clock()
        self.now = 0.0  # as it was read last

    def read(self) -> float:
        """The time now."""
        last, self._last = self._last, self._clock()
        self.now += min(self._last - last, self._most_s)
        return self.now
