"""What a worker does: one operation after the other, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.planner.errors import PlanError


@dataclass(frozen=True)
class Forward:
    """Receive the microbatch from the stage before (or the loader), run it, send it to the stage behind.

    `version` counts the updates that the weights to be used have seen.
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True)
class Backward:
    """Receive the gradient from the stage behind, run backward on the forward's version, send it on."""

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True)
class BackwardInput:
    """The half of a backward that the stage before waits for: the gradient of the input."""

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True)
class BackwardWeight:
    """The other half: the gradient of the weights, which nobody waits for."""

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True)
class Update:
    """Agree with the other replicas of the stage and write version `version` of its weights.

    Replicas without a microbatch in the round take part all the same, so that all agree.
    """

    stage: int
    version: int


Op = Forward | Backward | BackwardInput | BackwardWeight | Update
Operations = dict[int, tuple[Op, ...]]


@dataclass(frozen=True)
class Layout:
    """The workers of each stage, in order; a worker that holds several stages is named in each.

    Microbatch b goes through replica b mod R of a stage with R replicas, whatever the other stages have.
    """

    stages: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.stages or any(not workers for workers in self.stages):
            raise PlanError(
                f"found stages {self.stages}, expected at least one with at least one worker each"
            )
        for stage, workers in enumerate(self.stages):
            if len(set(workers)) < len(workers):
                raise PlanError(f"stage {stage}: found workers {workers}, expected each of them once")

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(sorted({worker for workers in self.stages for worker in workers}))

    @property
    def shared(self) -> bool:
        """Whether a worker holds several stages."""
        return len(self.workers) < self.devices_from(0)

    def replicas(self, stage: int) -> int:
        return len(self.stages[stage])

    def devices_from(self, stage: int) -> int:
        """Replicas of this stage and of all that follow."""
        return sum(len(workers) for workers in self.stages[stage:])

    def worker(self, stage: int, microbatch: int) -> int:
        """Who runs this microbatch in this stage."""
        workers = self.stages[stage]
        return workers[microbatch % len(workers)]


def straight_layout(replicas: Sequence[int]) -> Layout:
    """Stages with `replicas` replicas each, workers numbered in order."""
    stages, first = [], 0
    for count in replicas:
        stages.append(tuple(range(first, first + count)))
        first += count
    return Layout(tuple(stages))


def peer_before(layout: Layout, op: Forward) -> int | None:
    """Whom a forward receives from; None where the loader feeds the stage."""
    return layout.worker(op.stage - 1, op.microbatch) if op.stage > 0 else None


def peer_behind(layout: Layout, op: Backward | BackwardInput) -> int | None:
    """Whom a backward receives from; None where the loss does."""
    last = len(layout.stages) - 1
    return layout.worker(op.stage + 1, op.microbatch) if op.stage < last else None
