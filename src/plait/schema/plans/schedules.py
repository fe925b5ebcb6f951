"""Names of the pipeline schedules."""

from __future__ import annotations

import enum


class Schedule(enum.StrEnum):
    """The order in which a pipeline runs its microbatches."""

    STASH = "stash"
    TWO_BUFFERED = "2bw"
    FLUSH = "flush"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    NONE = "none"

    @property
    def synchronous(self) -> bool:
        """Whether the pipeline drains at each update, so that all microbatches see the same weights."""
        return self not in (Schedule.STASH, Schedule.TWO_BUFFERED)
