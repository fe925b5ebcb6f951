"""Changes of a running job, and the sources that request them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from plait.core.codec import decode, encode
from plait.schema.plans.plan import Plan


@dataclass(frozen=True)
class TopologyChange:
    """All-reduce over the topology of this name."""

    topology: str


@dataclass(frozen=True)
class BatchSizeChange:
    """Use batches of `batch_size` samples over all workers, with `lr_factor` times the job's learning rate.

    The factor applies to the learning rate of the job file and its schedule, not to the current one.
    """

    batch_size: int
    lr_factor: float = 1.0


@dataclass(frozen=True)
class WorkersChange:
    """Change the number of workers; takes effect when the joining workers are ready."""

    workers: int


@dataclass(frozen=True)
class SyncChange:
    """Use this sync, with these options, from the next step on."""

    sync: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanChange:
    """Use this plan; layers are moved to their new workers."""

    plan: Plan


@dataclass(frozen=True)
class Replan:
    """Search in the background for a plan for workers that take `slowness` times as long as planned.

    A `PlanChange` follows if a step becomes shorter by the fraction `gain`, and that pays for the move.
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
    """A change, who requests it, and why; all three are recorded in the run's events."""

    change: Change
    by: str
    why: str

    def as_values(self) -> list[Any]:
        """The request as plain values, for other workers."""
        return [type(self.change).__name__, encode(self.change), self.by, self.why]

    @staticmethod
    def from_values(values: Sequence[Any]) -> ChangeRequest:
        kind, change, by, why = values
        return ChangeRequest(decode(CHANGES[kind], change), by, why)


class ChangeSource(Protocol):
    """A source of changes: a table, policies, external requests.

    The loop calls it on the first worker and broadcasts the answer, so it need not be deterministic.
    """

    def next_due(self, step: int) -> int | None:
        """The first step after `step` at which to call `due`, equal on all workers; None for never."""

    def due(self, step: int) -> Sequence[ChangeRequest]:
        """The changes to apply after `step` steps, in this order."""


@runtime_checkable
class SavedSource(ChangeSource, Protocol):
    """A source with a state of plain values, which is saved in checkpoints and sent to all workers."""

    def state(self) -> Any:
        """The state for `load`."""

    def load(self, state: Any) -> None:
        """Load the state of a checkpoint, or of the first worker."""
