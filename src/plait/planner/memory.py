"""How much memory a stage needs under a schedule.

A device holds the weights once per version in flight, one gradient, the optimizer's state, the buffers,
and the activations of every microbatch in flight; with recomputation only the stage's input of each, and
the activations of the one being worked on. Neither the last stage nor pure data parallelism is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.graph.ideals import Floats, Ideals
from plait.planner.depth import Schedule
from plait.planner.errors import PlanError


@dataclass(frozen=True)
class MemorySettings:
    """What the optimizer and the user add: `optimizer_copies` is 1 for momentum, 2 for Adam, 0 for SGD."""

    optimizer_copies: float = 1.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if not (self.optimizer_copies >= 0 and math.isfinite(self.optimizer_copies)):
            raise PlanError(f"found {self.optimizer_copies:g} optimizer copies, expected 0 or more")


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Bytes of the stage between any two ideals: `fixed`, and `each` for a microbatch in flight."""

    fixed: Floats
    each: Floats

    def at(self, start: int, end: int, in_flight: int) -> float:
        return float(self.fixed[start, end] + in_flight * self.each[start, end])

    def most_in_flight(self, pairs: tuple[Any, Any], limit_bytes: float) -> Floats:
        """How many microbatches fit beside the rest, for the stages that `pairs` index."""
        with np.errstate(divide="ignore", invalid="ignore"):
            room = limit_bytes - self.fixed[pairs]
            fits = np.where(self.each[pairs] > 0, np.floor(room / self.each[pairs] + 1e-9), np.inf)
        return np.where(room >= 0, fits, 0)

    def restricted(self, keep: list[int]) -> StageMemory:
        pairs = np.ix_(keep, keep)
        return StageMemory(self.fixed[pairs], self.each[pairs])


def stage_memory(ideals: Ideals, schedule: Schedule, settings: MemorySettings) -> StageMemory:
    """The memory of every stage of `ideals` under `schedule`."""
    graph = ideals.graph
    nodes = [graph.node_by_id[name] for name in graph.order]
    weights = _ranges(ideals.parameter_bytes)
    buffers = _ranges(ideals.sums([node.buffer_bytes for node in nodes]))
    # Where nobody measured what autograd keeps, the outputs of the operations stand for it.
    kept = _ranges(ideals.sums([node.activation_bytes or node.output_bytes for node in nodes]))
    copies, versions_each = _versions(schedule)
    fixed = weights * (copies + 1 + settings.optimizer_copies) + buffers
    each = weights * versions_each
    if settings.recompute:
        return StageMemory(fixed + kept, each + ideals.crossing_bytes[:, None])
    return StageMemory(fixed, each + kept)


def _versions(schedule: Schedule) -> tuple[int, int]:
    """Copies of the weights: how many at any time, and how many more for each microbatch in flight."""
    if schedule is Schedule.STASH:
        return 0, 1
    if schedule is Schedule.TWO_BUFFERED:
        return 2, 0
    return 1, 0


def _ranges(amounts: Floats) -> Floats:
    return amounts[None, :] - amounts[:, None]
