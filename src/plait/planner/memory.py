"""How much memory a stage needs under a schedule.

What a worker holds for a stage while it trains, besides what any Python process with torch holds:

- the weights, once for each version: as many under stash as there are microbatches in flight (with vertical
  sync as many as the first stage has in flight, planner/as_run.py), two under 2bw, else one; one gradient of
  each; the optimizer's state; the buffers; where the stage has replicas, one copy more of the gradients, in
  which they are summed;
- the same of weights that belong to another stage and are used here too (`Graph.ties`). All stages that
  share a weight sum its gradients: schedules that drain hold one copy more for that, 2bw the sum of the batch
  before. Under stash each stage has given the gradients of some microbatches, which wait until the first
  of these stages has come so far, as that one has more in flight than itself (pipeline/tied_weights.py);
- for each microbatch in flight, what autograd keeps, the input that was received, and the output that was
  sent, which stays in the memory that both workers see until the stage behind is done with it. Outputs
  that autograd does not keep are given back once they are sent, and the stage's inputs count once, though
  layers keep them too;
- messages on their way: an input more, and two gradients in either direction;
- what the layer at work takes beyond all that, as it was measured: results that nobody keeps, gradients,
  the workspace of its kernels, and, where gradients add up over microbatches, those that are added. Early
  layers have it while little is kept as yet;
- with recomputation, of each microbatch only what was received and sent, and the activations of one.

What libraries keep for themselves is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from plait.core.errors import PlanError
from plait.graph.ideals import Floats, Ideals
from plait.planner.schedules.kinds import Schedule
from plait.schema.plans.graph import Graph, Node
from plait.schema.plans.plan import Stage

# Pairs of ideals times layers up to which the working memory of stages is exact.
EXACT_LIMIT = 50_000_000

Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True)
class MemorySettings:
    """What the optimizer and the user add: `optimizer_copies` is 1 for momentum, 2 for Adam, 0 for SGD."""

    optimizer_copies: float = 1.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if not (self.optimizer_copies >= 0 and math.isfinite(self.optimizer_copies)):
            raise PlanError(f"found {self.optimizer_copies:g} optimizer copies, expected 0 or more")


@dataclass(frozen=True, eq=False)
class Held(Generic[Amount]):
    """What a stage is made of, in bytes, or every stage of a family: weights, buffers, and by microbatch.

    `kept` is what autograd keeps besides the inputs, `working` what a layer at work takes beyond it. `shared`
    are the weights that other stages use too, `waiting` their gradients that wait for the others under stash.
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
        """What is there however many microbatches are in flight, but for the versions of the weights."""
        copies = 1 + settings.optimizer_copies
        state = self.weights * copies + self.buffers + self._queued(schedule) + self.working
        state = state + (self.waiting if schedule is Schedule.STASH else self.shared)
        return state + self.kept if settings.recompute else state

    def microbatch(self, settings: MemorySettings) -> Amount:
        """What each microbatch in flight takes, but for a version of the weights."""
        messages = self.received + self.sent
        return messages if settings.recompute else messages + self.kept

    def _queued(self, schedule: Schedule) -> Amount:
        """Messages on their way besides those of the microbatches in flight."""
        if schedule is Schedule.NONE:
            return self.received + self.sent
        return 3 * self.received + 2 * self.sent


def held_by(stage: Stage) -> Held[float]:
    """What the memory of a plan's stage is made of."""
    return Held(
        stage.parameter_bytes + stage.tied.copied_bytes,
        stage.buffer_bytes,
        stage.activation_bytes,
        stage.input_bytes,
        stage.output_bytes,
        stage.working_bytes,
        stage.tied.shared_bytes,
        stage.tied.waiting_bytes,
    )


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Bytes of the stage between any two ideals: `fixed`, and `each` for a microbatch in flight.

    Replicas hold `summed` besides.
    """

    fixed: Floats
    each: Floats
    summed: Floats

    def at(self, start: int, end: int, in_flight: int, replicas: int = 1) -> float:
        summed = self.summed[start, end] if replicas > 1 else 0.0
        return float(self.fixed[start, end] + in_flight * self.each[start, end] + summed)

    def most_in_flight(self, pairs: tuple[Any, Any], limit_bytes: float, replicated: bool) -> Floats:
        """How many microbatches fit next to the rest, for the stages that `pairs` index."""
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
    """The memory of every stage of `ideals` under `schedule`; `deepest` is the most in flight in any.

    For gradients of tied weights that wait under stash it is a bound from above: which stage uses them
    first, and how deep that is, is not known of a stage alone. Working memory is exact up to `exact_limit`
    layers over all pairs of ideals, else a bound from above, too.
    """
    graph = ideals.graph
    nodes = [graph.node_by_id[name] for name in graph.order]
    kept = kept_bytes(graph)
    adds = schedule is not Schedule.STASH
    received, shape = ideals.crossing_bytes[:, None], (len(ideals), len(ideals))
    shared, copied = _tied(ideals)
    held = Held(
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
    # The more a stage itself has in flight, the fewer of its gradients wait.
    come = shared if schedule is Schedule.STASH else 0.0
    return StageMemory(
        held.weights * copies + held.state(schedule, settings),
        held.weights * versions_each + held.microbatch(settings) - come,
        held.weights - shared,
    )


def _tied(ideals: Ideals) -> tuple[Floats, Floats]:
    """Bytes of the weights that each stage shares with others, and of those that another one counts."""
    shared, copied = np.zeros((2, len(ideals), len(ideals)))
    for tie in ideals.graph.ties:
        users = _ranges(ideals.sums([name in tie.nodes for name in ideals.graph.order]))
        counts = _ranges(ideals.sums([name == tie.nodes[0] for name in ideals.graph.order]))
        apart = (users > 0) & (users < len(tie.nodes))
        shared += tie.bytes * apart
        copied += tie.bytes * (apart & (counts < 1))
    return shared, copied


def kept_bytes(graph: Graph) -> dict[str, float]:
    """What autograd keeps of each layer; where nobody measured it, the layers' outputs stand for it."""
    measured = any(node.activation_bytes for node in graph.nodes)
    return {node.id: node.activation_bytes if measured else node.output_bytes for node in graph.nodes}


def working_bytes(nodes: Sequence[Node], schedule: Schedule) -> float:
    """What a layer of a stage at work takes at most beyond what all of its layers keep in the end."""
    most, kept = 0.0, 0.0
    for node in nodes:
        adding = 0.0 if schedule is Schedule.STASH else node.adding_bytes
        most = max(most, kept + node.working_bytes + adding)
        kept += node.activation_bytes
    return max(0.0, most - kept)


def _working_of_stages(ideals: Ideals, adds: bool, exact_limit: int) -> Floats:
    """`working_bytes` of every stage; from above where there are too many to look into each."""
    nodes = [ideals.graph.node_by_id[name] for name in ideals.graph.order]
    kept = np.array([node.activation_bytes for node in nodes])
    taken = np.array([node.working_bytes + adds * node.adding_bytes for node in nodes])
    working = np.zeros((len(ideals), len(ideals)))
    if not taken.any():
        return working
    if np.array_equal(ideals.members, np.tri(len(nodes) + 1, len(nodes), -1, dtype=bool)):
        # A chain: a layer more keeps its own, and takes what it takes.
        for layer in range(len(nodes)):
            most = np.maximum(working[: layer + 1, layer], taken[layer]) - kept[layer]
            working[: layer + 1, layer + 1] = np.maximum(most, 0.0)
        return working
    if len(ideals) ** 2 * len(nodes) > exact_limit:
        return np.broadcast_to(np.where(ideals.members, taken, 0.0).max(axis=1), working.shape)
    for start, before in enumerate(ideals.members):
        behind = np.flatnonzero(~before)
        within = ideals.members[start:, behind]
        own = within * kept[behind]
        peaks = within * (np.cumsum(own, axis=1) - own + taken[behind])
        working[start, start:] = peaks.max(axis=1, initial=0.0) - own.sum(axis=1)
    return np.maximum(working, 0.0)


def versions(schedule: Schedule) -> tuple[int, int]:
    """Copies of the weights: how many at any time, and how many more for each microbatch in flight."""
    if schedule is Schedule.STASH:
        return 0, 1
    if schedule is Schedule.TWO_BUFFERED:
        return 2, 0
    return 1, 0


def _ranges(amounts: Floats) -> Floats:
    return amounts[None, :] - amounts[:, None]
