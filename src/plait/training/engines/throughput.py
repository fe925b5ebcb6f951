"""The throughput of one worker in decentralized training, as an event about once a second."""

from __future__ import annotations

import time

from plait.core import run_events
from plait.sync.averaging.base import SyncStats

PACE_S = 1.0


class ThroughputMeter:
    """Counts this worker's updates between two events."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._step = self._updates = self._samples = 0
        self._before = SyncStats()

    def count(self, step: int, samples: int) -> None:
        """Count an update on `samples` samples of a step."""
        self._step = step
        self._updates += 1
        self._samples += samples

    def is_due(self) -> bool:
        return time.monotonic() - self._since >= PACE_S

    def event(self, stats: SyncStats) -> run_events.Pace:
        """The event for the updates and averages since the last event."""
        now = time.monotonic()
        seconds, before = now - self._since, self._before
        groups = stats.groups - before.groups
        event = run_events.Pace(
            step=self._step,
            updates=self._updates,
            samples=self._samples,
            seconds=round(seconds, 6),
            samples_per_s=round(self._samples / max(seconds, 1e-9), 1),
            wait_share=round((stats.waited_s - before.waited_s) / max(seconds, 1e-9), 4),
            groups=groups,
            group_size=round((stats.members - before.members) / groups, 3) if groups else None,
            bytes_sent=stats.bytes_sent - before.bytes_sent,
        )
        self._since, self._updates, self._samples = now, 0, 0
        self._before = SyncStats(stats.groups, stats.members, stats.waited_s, stats.bytes_sent)
        return event
