"""Changes of a running job: what can be changed, who asks for it, and when the loop looks for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from plait.core.codec import decode, encode
from plait.schema.plans.plan import Plan


@dataclass(frozen=True)
class TopologyChange:
    """Sum gradients over the topology of this name."""

    topology: str


@dataclass(frozen=True)
class BatchSizeChange:
    """Take batches of `batch_size` samples over all workers, with `lr_factor` times the job's learning rate.

    The factor is on the learning rate that the job file and its schedule give, not on the one before.
    """

    batch_size: int
    lr_factor: float = 1.0


@dataclass(frozen=True)
class WorkersChange:
    """Go on with that many workers: asked for now, made once those that join are ready."""

    workers: int


@dataclass(frozen=True)
class SyncChange:
    """Let workers agree by this sync, with these options, from the next step on."""

    sync: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanChange:
    """Lay the model out by this plan; layers whose workers change move there."""

    plan: Plan


@dataclass(frozen=True)
class Replan:
    """Look for a plan for workers that take `slowness` times as long as planned, beside the training.

    A `PlanChange` follows where a step becomes shorter by the share `gain` of it, and that pays for the move.
    """

    slowness: tuple[float, ...]
    gain: float = 0.1


# What the loop can be asked to apply between two steps.
Change = TopologyChange | BatchSizeChange | WorkersChange | SyncChange | PlanChange | Replan


CHANGES: Mapping[str, type[Change]] = {
    kind.__name__: kind
    for kind in (TopologyChange, BatchSizeChange, WorkersChange, SyncChange, PlanChange, Replan)
}


@dataclass(frozen=True)
class ChangeRequest:
    """A change, who asks for it, and why: all three go into the run's record."""

    change: Change
    by: str
    why: str

    def as_values(self) -> list[Any]:
        """As plain values, for other workers."""
        return [type(self.change).__name__, encode(self.change), self.by, self.why]

    @staticmethod
    def from_values(values: Sequence[Any]) -> ChangeRequest:
        kind, change, by, why = values
        return ChangeRequest(decode(CHANGES[kind], change), by, why)


class ChangeSource(Protocol):
    """Where changes come from: a table, policies, requests from outside.

    The loop asks it on the first worker, and gives the answer to all: it may decide by whatever it likes.
    """

    def next_due(self, step: int) -> int | None:
        """The first step after `step` at which it is to be asked, the same on all workers; None for never."""

    def due(self, step: int) -> Sequence[ChangeRequest]:
        """The changes to apply now that `step` steps are done, in this order."""


@runtime_checkable
class SavedSource(ChangeSource, Protocol):
    """A source with a state, as plain values, which checkpoints and workers that are not asked have too."""

    def state(self) -> Any:
        """What `load` goes on from."""

    def load(self, state: Any) -> None:
        """Go on from the state of a checkpoint, or of the worker that was asked."""
