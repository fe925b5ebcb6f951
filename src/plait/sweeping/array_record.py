"""The arrays of a sweep: which trials trained together, fused or not, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from plait.core import run_events
from plait.core.events import Event
from plait.schema.results import ArrayResult


class Arrays:
    """The arrays of a sweep in order, from the events that record their changes."""

    def __init__(self, past: Iterable[Event] = ()) -> None:
        self._records: list[ArrayResult] = []
        # The number of the array that each worker trains.
        self._open: dict[int, int] = {}
        for event in past:
            if isinstance(event, run_events.ArrayChanged):
                self.changed(event)
            elif isinstance(event, run_events.SweepStarted):
                self._open.clear()
            elif isinstance(event, run_events.WorkersChanged):
                self.end(event.lost)
        self._open.clear()

    def end(self, workers: Iterable[int]) -> None:
        """The arrays of workers that are lost have ended."""
        for worker in workers:
            self._open.pop(worker, None)

    def changed(self, event: run_events.ArrayChanged) -> None:
        """Apply a change; an array without trials has ended."""
        if not event.trials:
            self._open.pop(event.worker, None)
            return
        if event.worker not in self._open:
            number = self._open[event.worker] = len(self._records)
            self._records.append(ArrayResult(number, event.worker, (), 0, False, ""))
        record = self._records[self._open[event.worker]]
        # That a single trial is left of a fused array explains nothing.
        explains = event.fused or not record.fused
        self._records[record.number] = replace(
            record,
            trials=tuple(dict.fromkeys((*record.trials, *event.trials))),
            most=max(record.most, len(event.trials)),
            fused=record.fused or event.fused,
            why=event.why if explains else record.why,
        )

    def table(self, latest: int = 0) -> tuple[ArrayResult, ...]:
        """All arrays, or the `latest` of them."""
        return tuple(self._records[-latest:])
