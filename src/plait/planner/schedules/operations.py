"""What a worker does: one operation after the other, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


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
