"""Engines compute intervals of steps; they are all that the loop knows about parallelism."""

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
from plait.adapt.members import ProgressMark
from plait.comm.collectives import broadcast_value
from plait.core.errors import JobError, PeerError
from plait.data.sampler import Position
from plait.launcher.worker_process import Worker
from plait.training.checkpoint import Checkpoint, EngineState


@dataclass(frozen=True)
class IntervalResult:
    """The result of an interval, the same on all workers: steps taken and the data positions of trials."""

    steps: int
    positions: tuple[Position, ...]
    # Whether a worker was asked to stop, and whether the data has ended.
    stopped: bool = False
    ended: bool = False
    # Whether a worker received a request for a change of members.
    change_asked: bool = False
    # Set if the interval ended because a worker was lost; the interrupted step is undone and not counted.
    lost: PeerError | None = None
    # The sums of the trials' losses over these steps, if no worker has the losses of whole steps.
    losses: tuple[float, ...] = ()


class TrialsEngine(Protocol):
    """The part of an engine that the loop needs; slots number its trials."""

    def train(self, steps: int) -> IntervalResult:
        """Take `steps` steps, or fewer if a worker is asked to stop or the data end."""

    def evaluate(self, slots: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss and metric of the trials in `slots` over the test split, the same on all workers."""

    def state(self, slot: int) -> EngineState | None:
        """The state of the trial in `slot`, on the worker that writes checkpoints."""


class Engine(TrialsEngine, Protocol):
    """Computes intervals of steps, on this worker together with the others.

    All workers call each method together, in the same order, except `load`. A closed engine can be opened
    again among other workers.
    """

    def load(self, state: Checkpoint) -> None:
        """Load the tensors of a checkpoint; CheckpointError if they do not fit."""

    def open(self) -> None:
        """Connect to the other workers and prepare to take steps."""

    def apply(self, change: Change) -> None:
        """Apply a change between two steps; JobError if this engine does not support it."""

    def synchronize(self, staying: Sequence[int]) -> None:
        """Give all workers the same state, including running statistics, between two intervals.

        Ranks in `staying` also receive layers that only leaving ranks hold.
        """

    def close(self) -> None:
        """Close the connections to the other workers."""

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        """The rank that all workers continue from, chosen by their progress, and the state of this worker.

        Called while the engine is closed. None if the workers no longer hold a complete state and must load
        a checkpoint; the model is then newly built.
        """


def ask_rank_0(worker: Worker, ask: Callable[[], Any]) -> Any:
    """Call `ask` on rank 0 and broadcast what it returns."""
    if worker.world_size == 1:
        return ask()
    return broadcast_value(ask() if worker.rank == 0 else None, 0)


def cannot_apply(change: Change, engine: str) -> JobError:
    """The error for a change that the engine does not support."""
    reasons = {
        TopologyChange: "has no topology that can change",
        BatchSizeChange: "has batches that cannot change",
        WorkersChange: "cannot change its number of workers",
        SyncChange: "cannot change how its workers agree",
        PlanChange: "has no stages whose layers could move",
        Replan: "has no plan that can change",
    }
    why = f"{engine} {reasons[type(change)]}"
    return JobError(f"adapt: cannot apply {change}: {why}; leave the policy that asks for it out")
