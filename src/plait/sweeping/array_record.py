"""Which arrays a sweep has had: who trained together, fused or not, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.core import run_events
from plait.core.events import Event


@dataclass
class ArrayRecord:
    """One array from its beginning to its end: all trials that were in it, and the most at once."""

    number: int
    worker: int
    trials: list[int] = field(default_factory=list)
    most: int = 0
    fused: bool = False
    why: str = ""


class Arrays:
    """The arrays of a sweep in order, from the events that tell of their changes."""

    def __init__(self, past: Iterable[Event] = ()) -> None:
        self._records: list[ArrayRecord] = []
        self._open: dict[int, ArrayRecord] = {}
        for event in past:
            if isinstance(event, run_events.ArrayChanged):
                self.changed(event)
            elif isinstance(event, run_events.SweepStarted):
                self._open.clear()
        self._open.clear()

    def changed(self, event: run_events.ArrayChanged) -> None:
        """Take up a change; an array without trials is gone."""
        if not event.trials:
            self._open.pop(event.worker, None)
            return
        record = self._open.get(event.worker)
        if record is None:
            record = self._open[event.worker] = ArrayRecord(len(self._records), event.worker)
            self._records.append(record)
        record.trials += [trial for trial in event.trials if trial not in record.trials]
        record.most = max(record.most, len(event.trials))
        record.fused = record.fused or event.fused
        # That a single trial is left of a fused array explains nothing.
        if event.fused or not record.fused:
            record.why = event.why

    def table(self, latest: int = 0) -> list[dict[str, Any]]:
        """All arrays, or the `latest` of them."""
        return [asdict(record) for record in self._records[-latest:]]
