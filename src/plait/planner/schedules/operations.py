"""The operations of a worker, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Receive the microbatch from the previous stage (or the loader), run it, send it to the next stage.

    `version` counts the updates of the weights to be used.
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True)
class Backward:
    """Receive the gradient from the next stage, run backward with the forward's version, send it on."""

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True)
class BackwardInput:
    """The input gradient, which the previous stage needs."""

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True)
class BackwardWeight:
    """The weight gradient, which no other stage needs."""

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True)
class Update:
    """Sum gradients with the other replicas of the stage and write version `version` of its weights.

    Replicas without a microbatch in the round also take part.
    """

    stage: int
    version: int


Op = Forward | Backward | BackwardInput | BackwardWeight | Update
Operations = dict[int, tuple[Op, ...]]
