"""A source of changes for tests: a table of steps, known beforehand."""

from __future__ import annotations

from collections.abc import Mapping

from plait.adapt.changes import Change, ChangeRequest


class StepTable:
    """Changes at steps that are known beforehand."""

    def __init__(self, changes: Mapping[int, Change | None]) -> None:
        self._changes = dict(changes)

    def next_due(self, step: int) -> int | None:
        return min((at for at in self._changes if at > step), default=None)

    def due(self, step: int) -> list[ChangeRequest]:
        change = self._changes.get(step)
        return [] if change is None else [ChangeRequest(change, "table", f"step {step}")]
