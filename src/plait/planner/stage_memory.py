"""The memory of a stage under a schedule.

A worker holds the following for a stage, besides the memory of any Python process with torch:

- the weights, once for each version: as many under stash as there are microbatches in flight (with vertical
  sync as many as the first stage has in flight, planner/plan_memory.py), two under 2bw, else one; one
  gradient of each; the optimizer's state; the buffers; where the stage has replicas, one copy more of the
  gradients, in which they are summed;
- the same for weights that belong to another stage and are also used here (`Graph.ties`). All stages that
  share a weight sum its gradients: schedules that drain hold one more copy for that, 2bw the sum of the
  previous batch. Under stash each stage contributes gradients of microbatches that the first of these stages
  has not yet reached, as that one has more in flight (pipeline/tied_weights.py);
- for each microbatch in flight, what autograd saves, the received input, and the sent output, which stays in
  shared memory until the next stage releases it. Outputs that autograd does not save are freed after sending,
  and the stage's inputs are counted once, although layers save them too;
- messages in transit: one more input, and two gradients in either direction;
- the measured working memory of the running layer beyond all that: temporary results, gradients, workspace
  of its kernels, and, if gradients are accumulated over microbatches, those that are added. Early layers need
  it while little is saved yet;
- with recomputation, for each microbatch only what was received and sent, and the activations of one.

Internal memory of libraries is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from plait.core.errors import PlanError
from plait.graph.ideals import Floats, Ideals
from plait.planner.schedules.in_flight import Schedule
from plait.schema.plans.graph import Graph, Node
from plait.schema.plans.plan import Stage

# Up to this many pairs of ideals times layers, the working memory of stages is exact.
EXACT_LIMIT = 50_000_000

Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True)
class MemorySettings:
    """Memory options: `optimizer_copies` is 1 for momentum, 2 for Adam, 0 for SGD."""

    optimizer_copies: float = 1.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if not (self.optimizer_copies >= 0 and math.isfinite(self.optimizer_copies)):
            raise PlanError(f"found {self.optimizer_copies:g} optimizer copies, expected 0 or more")


@dataclass(frozen=True, eq=False)
class MemoryParts(Generic[Amount]):
    """The parts of a stage's memory in bytes, or of every stage of a family.

    Per microbatch: `received` inputs, `sent` outputs and what autograd saves besides the inputs (`kept`).
    `working` is the largest temporary memory of one layer in addition to `kept`. `shared` are the weights
    that other stages also use, `waiting` the gradients of these weights until the other stages have theirs
    (schedule stash only).
    """

    weights: Amount
    buffers: Amount
    kept: Amount
    received: Amount
    sent: Amount
    working: Amount
    shared: Amount
    waiting: Amount

    def state(self, schedule: Schedule, settings: MemorySettings) -> Amount:
        """The memory that does not depend on the microbatches in flight, without weight versions."""
        copies = 1 + settings.optimizer_copies
        state = self.weights * copies + self.buffers + self._queued(schedule) + self.working
        state = state + (self.waiting if schedule is Schedule.STASH else self.shared)
        return state + self.kept if settings.recompute else state

    def microbatch(self, settings: MemorySettings) -> Amount:
        """The memory per microbatch in flight, without weight versions."""
        messages = self.received + self.sent
        return messages if settings.recompute else messages + self.kept

    def _queued(self, schedule: Schedule) -> Amount:
        """Messages in transit besides those of the microbatches in flight."""
        if schedule is Schedule.NONE:
            return self.received + self.sent
        return 3 * self.received + 2 * self.sent


def memory_parts(stage: Stage) -> MemoryParts[float]:
    """The parts of the memory of a plan's stage."""
    return MemoryParts(
        stage.parameter_bytes + stage.tied.copied_bytes,
        stage.buffer_bytes,
        stage.activation_bytes,
        stage.input_bytes,
        stage.output_bytes,
        stage.working_bytes,
        stage.tied.shared_bytes,
        stage.tied.waiting_bytes,
    )


def stage_bytes(
    stage: Stage, schedule: Schedule, settings: MemorySettings, weight_versions: int | None = None
) -> float:
    """The memory of a plan's stage, with its microbatches in flight.

    It has as many `weight_versions` as the schedule keeps, unless given.
    """
    copies, each = versions(schedule)
    count = copies + each * stage.in_flight if weight_versions is None else weight_versions
    parts = memory_parts(stage)
    weights = parts.weights * count + stage.summed_bytes
    return weights + parts.state(schedule, settings) + stage.in_flight * parts.microbatch(settings)


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Bytes of the stage between any two ideals: `fixed`, and `each` per microbatch in flight.

    Replicas additionally hold `summed`.
    """

    fixed: Floats
    each: Floats
    summed: Floats

    def at(self, start: int, end: int, in_flight: int, replicas: int = 1) -> float:
        summed = self.summed[start, end] if replicas > 1 else 0.0
        return float(self.fixed[start, end] + in_flight * self.each[start, end] + summed)

    def most_in_flight(self, pairs: tuple[Any, Any], limit_bytes: float, replicated: bool) -> Floats:
        """How many microbatches in flight fit into the limit, for the stages that `pairs` index."""
        with np.errstate(divide="ignore", invalid="ignore"):
            room = limit_bytes - self.fixed[pairs] - (self.summed[pairs] if replicated else 0.0)
            fits = np.where(self.each[pairs] > 0, np.floor(room / self.each[pairs] + 1e-9), np.inf)
        return np.where(room >= 0, fits, 0)

    def restricted(self, keep: list[int]) -> StageMemory:
        pairs = np.ix_(keep, keep)
        return StageMemory(self.fixed[pairs], self.each[pairs], self.summed[pairs])


def stage_memory(
    ideals: Ideals,
    schedule: Schedule,
    settings: MemorySettings,
    deepest: int = 1,
    exact_limit: int = EXACT_LIMIT,
) -> StageMemory:
    """The memory of every stage of `ideals` under `schedule`; `deepest` is the maximum in flight in any.

    For waiting gradients of tied weights under stash it is an upper bound, as it is not known which stage
    uses them first and how deep that is. Working memory is exact up to `exact_limit` layers over all pairs of
    ideals, otherwise an upper bound.
    """
    graph = ideals.graph
    nodes = [graph.node_by_id[name] for name in graph.order]
    kept = kept_bytes(graph)
    adds = schedule is not Schedule.STASH
    received, shape = ideals.crossing_bytes[:, None], (len(ideals), len(ideals))
    shared, copied = _tied(ideals)
    held = MemoryParts(
        weights=_ranges(ideals.parameter_bytes) + copied,
        buffers=_ranges(ideals.sums([node.buffer_bytes for node in nodes])),
        kept=_ranges(ideals.sums([kept[node.id] for node in nodes])) - ideals.kept_behind_bytes[:, None],
        received=np.broadcast_to(received, shape),
        sent=np.broadcast_to(received.T, shape),
        working=_working_of_stages(ideals, adds, exact_limit),
        shared=shared,
        waiting=deepest * shared,
    )
    copies, versions_each = versions(schedule)
    # The more microbatches a stage has in flight, the fewer of its gradients wait.
    come = shared if schedule is Schedule.STASH else 0.0
    return StageMemory(
        held.weights * copies + held.state(schedule, settings),
        held.weights * versions_each + held.microbatch(settings) - come,
        held.weights - shared,
    )


def _tied(ideals: Ideals) -> tuple[Floats, Floats]:
    """Bytes of the weights that each stage shares with others, and of those counted by another stage."""
    shared, copied = np.zeros((2, len(ideals), len(ideals)))
    for tie in ideals.graph.ties:
        users = _ranges(ideals.sums([name in tie.nodes for name in ideals.graph.order]))
        counts = _ranges(ideals.sums([name == tie.nodes[0] for name in ideals.graph.order]))
        apart = (users > 0) & (users < len(tie.nodes))
        shared += tie.bytes * apart
        copied += tie.bytes * (apart & (counts < 1))
    return shared, copied


def kept_bytes(graph: Graph) -> dict[str, float]:
    """What autograd saves of each layer; the layers' outputs if that was not measured."""
    measured = any(node.activation_bytes for node in graph.nodes)
    return {node.id: node.activation_bytes if measured else node.output_bytes for node in graph.nodes}


def working_bytes(nodes: Sequence[Node], schedule: Schedule) -> float:
    """The maximum working memory of a stage's layers beyond what all of its layers save."""
    most, kept = 0.0, 0.0
    for node in nodes:
        adding = 0.0 if schedule is Schedule.STASH else node.adding_bytes
        most = max(most, kept + node.working_bytes + adding)
        kept += node.activation_bytes
    return max(0.0, most - kept)


def _working_of_stages(ideals: Ideals, adds: bool, exact_limit: int) -> Floats:
    """`working_bytes` of every stage; an upper bound if there are too many for an exact result."""
    nodes = [ideals.graph.node_by_id[name] for name in ideals.graph.order]
    kept = np.array([node.activation_bytes for node in nodes])
    needed = np.array([node.working_bytes + adds * node.adding_bytes for node in nodes])
    working = np.zeros((len(ideals), len(ideals)))
    if not needed.any():
        return working
    if np.array_equal(ideals.members, np.tri(len(nodes) + 1, len(nodes), -1, dtype=bool)):
        # A chain: extend each stage by one layer at a time.
        for layer in range(len(nodes)):
            most = np.maximum(working[: layer + 1, layer], needed[layer]) - kept[layer]
            working[: layer + 1, layer + 1] = np.maximum(most, 0.0)
        return working
    if len(ideals) ** 2 * len(nodes) > exact_limit:
        return np.broadcast_to(np.where(ideals.members, needed, 0.0).max(axis=1), working.shape)
    for start, before in enumerate(ideals.members):
        behind = np.flatnonzero(~before)
        within = ideals.members[start:, behind]
        saved = within * kept[behind]
        peaks = within * (np.cumsum(saved, axis=1) - saved + needed[behind])
        working[start, start:] = peaks.max(axis=1, initial=0.0) - saved.sum(axis=1)
    return np.maximum(working, 0.0)


def versions(schedule: Schedule) -> tuple[int, int]:
    """Copies of the weights: a constant number, and how many more per microbatch in flight."""
    if schedule is Schedule.STASH:
        return 0, 1
    if schedule is Schedule.TWO_BUFFERED:
        return 2, 0
    return 1, 0


def _ranges(amounts: Floats) -> Floats:
    return amounts[None, :] - amounts[:, None]
