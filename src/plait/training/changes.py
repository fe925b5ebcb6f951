"""Changes of a running job: what can be changed, who asks for it, and when the loop looks for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TopologyChange:
    """Sum gradients over the topology of this name."""

    topology: str


@dataclass(frozen=True)
class WorkersChange:
    """Train with that many workers: asked for now, made once those that join are ready."""

    workers: int


# What a run can be asked to change between two steps.
Change = TopologyChange | WorkersChange


@dataclass(frozen=True)
class ChangeRequest:
    """A change, who asks for it, and why: all three go into the run's record."""

    change: Change
    by: str
    why: str


class ChangeSource(Protocol):
    """Where changes come from: a table, policies, requests from outside.

    All workers call each method together, after the same step, and get the same answer.
    """

    def next_due(self, step: int) -> int | None:
        """The first step after `step` at which `due` must be called; None where none is known."""

    def due(self, step: int) -> Sequence[ChangeRequest]:
        """The changes to apply now that `step` steps are done, in this order."""


class StepTable:
    """Changes at steps that are known beforehand."""

    def __init__(self, changes: Mapping[int, Change]) -> None:
        self._changes = dict(changes)

    def next_due(self, step: int) -> int | None:
        return min((at for at in self._changes if at > step), default=None)

    def due(self, step: int) -> list[ChangeRequest]:
        change = self._changes.get(step)
        return [] if change is None else [ChangeRequest(change, "table", f"step {step}")]
