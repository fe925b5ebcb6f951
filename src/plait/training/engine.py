"""Engines: how an interval of steps is computed, the only thing that the loop knows about parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plait.adapt.changes import (
    BatchSizeChange,
    Change,
    PlanChange,
    Replan,
    SyncChange,
    TopologyChange,
    WorkersChange,
)
from plait.comm.collectives import broadcast_value
from plait.core.errors import JobError, PeerError
from plait.data.sampler import Position
from plait.launch.worker import Worker
from plait.training.change.members import Mark
from plait.training.checkpoint import Checkpoint, EngineState


@dataclass(frozen=True)
class IntervalResult:
    """What came of an interval of steps, the same on all workers: its steps, and where trials are then."""

    steps: int
    positions: tuple[Position, ...]
    # Whether a worker was asked to stop, and whether the data has ended.
    stopped: bool = False
    ended: bool = False
    # Whether a worker was told that other workers are to take part.
    change_asked: bool = False
    # The loss of a worker that ended the interval; the step it was lost in is not counted, and not taken.
    lost: PeerError | None = None


class Engine(Protocol):
    """How intervals of steps are computed, on this worker together with the others.

    All workers call each method together, in the same order; `load` each for itself. It can be closed and,
    among other workers, opened again.
    """

    def load(self, state: Checkpoint) -> None:
        """Go on from the tensors of a checkpoint; CheckpointError if they do not fit."""

    def open(self) -> None:
        """Link up with the other workers, and get ready to take steps."""

    def train(self, steps: int) -> IntervalResult:
        """Take that many steps, or fewer if someone is asked to stop or the data ends."""

    def evaluate(self, slots: Sequence[int] = (0,)) -> list[dict[str, float]]:
        """Mean loss and metric of the trials in `slots` over the test split, the same on all workers."""

    def state(self, slot: int = 0) -> EngineState | None:
        """The state of the trial in `slot`, on the worker that writes checkpoints."""

    def apply(self, change: Change) -> None:
        """Change the run between two steps; JobError where this engine cannot."""

    def settle(self, staying: Sequence[int]) -> None:
        """Give all workers the same state, running statistics included, between two intervals.

        Those of the ranks `staying` get what only others hold, which are to leave.
        """

    def close(self) -> None:
        """End the links to the other workers."""

    def hand_over(self, marks: Sequence[Mark]) -> tuple[int, EngineState] | None:
        """The rank that all go on from, by how far each is, and what this worker would give to the others.

        Called while it is closed. None where what the workers hold is not a whole state any more: only a
        checkpoint is. Then the model is as its factory makes it.
        """


def ask_rank_0(worker: Worker, ask: Callable[[], Any]) -> Any:
    """What `ask` returns on rank 0, on all workers of the process group."""
    if worker.world_size == 1:
        return ask()
    return broadcast_value(ask() if worker.rank == 0 else None, 0)


def cannot_apply(change: Change, engine: str) -> JobError:
    """What a user is told who asks for a change that an engine has no way to make."""
    reasons = {
        TopologyChange: "has no topology that can change",
        BatchSizeChange: "has batches that cannot change",
        WorkersChange: "cannot change its number of workers",
        SyncChange: "cannot change how its workers agree",
        PlanChange: "has no stages whose layers could move",
        Replan: "has no plan that could be made anew",
    }
    why = f"{engine} {reasons[type(change)]}"
    return JobError(f"adapt: cannot apply {change}: {why}; leave the policy that asks for it out")
