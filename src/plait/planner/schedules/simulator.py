"""Simulates a schedule's operations with costs: step time, idle share, peak memory and a timeline.

Workers run their operations strictly in order. An operation starts when the worker is free and its input has
arrived; sends run in the background, one at a time on each directed pair of workers; an update waits for all
replicas of its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plait.core.errors import PlanError
from plait.planner.schedules.operations import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Op,
    Operations,
    Update,
)
from plait.schema.plans.plan import Layout


@dataclass(frozen=True)
class StageCosts:
    """The costs of one microbatch in a stage, on a device of the profiled kind.

    `output_bytes` are sent forward, and returned as gradients. `weight_share` is the fraction of the backward
    for weight gradients, if a schedule splits it. A worker holds `state_bytes`, `parameter_bytes` per version
    of the weights and `microbatch_bytes` per microbatch in flight.
    """

    forward_s: float
    backward_s: float
    output_bytes: float
    update_s: float = 0.0
    weight_share: float = 0.5
    parameter_bytes: float = 0.0
    state_bytes: float = 0.0
    microbatch_bytes: float = 0.0


@dataclass(frozen=True)
class SimulatedLink:
    """A directed link between two workers."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True)
class SimulatedOp:
    """One operation on the timeline."""

    worker: int
    start_s: float
    end_s: float
    op: Op


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation."""

    ops: tuple[SimulatedOp, ...]
    workers: int
    peak_bytes: dict[int, float]

    @property
    def end_s(self) -> float:
        return max((op.end_s for op in self.ops), default=0.0)

    def idle_share(self, start_s: float = 0.0, end_s: float | None = None) -> float:
        """The fraction of the workers' time between two moments in which they are idle."""
        end_s = self.end_s if end_s is None else end_s
        busy = sum(max(0.0, min(op.end_s, end_s) - max(op.start_s, start_s)) for op in self.ops)
        window = (end_s - start_s) * self.workers
        return 1 - busy / window if window > 0 else 0.0

    def finished_s(self, microbatches: int) -> float:
        """When this many microbatches have finished their backward in the first stage."""
        ends = [s.end_s for s in self.ops if s.op.stage == 0 and isinstance(s.op, (Backward, BackwardInput))]
        return sorted(ends)[microbatches - 1]


Links = Callable[[int, int], SimulatedLink]


def simulate(
    layout: Layout,
    operations: Operations,
    costs: Sequence[StageCosts],
    links: Links,
    speeds: Callable[[int], float] = lambda worker: 1.0,
) -> Simulation:
    """The timeline of `operations`; `links` and `speeds` describe the workers."""
    replay = _Replay(layout, operations, costs, links, speeds)
    replay.run()
    peaks = {worker: peak_bytes(ops, costs) for worker, ops in operations.items()}
    return Simulation(tuple(replay.ops), len(layout.workers), peaks)


def peak_bytes(ops: Sequence[Op], costs: Sequence[StageCosts]) -> float:
    """The peak memory of a worker during `ops`."""
    stages = {op.stage for op in ops}
    held: dict[int, dict[int, int]] = {stage: {} for stage in stages}
    current = dict.fromkeys(stages, 0)
    fixed = sum(costs[stage].state_bytes for stage in stages)
    peak = 0.0
    for op in ops:
        if isinstance(op, Forward):
            held[op.stage][op.microbatch] = op.version
        versions = {stage: {current[stage], *held[stage].values()} for stage in stages}
        now = sum(
            len(versions[stage]) * costs[stage].parameter_bytes
            + len(held[stage]) * costs[stage].microbatch_bytes
            for stage in stages
        )
        peak = max(peak, now)
        if isinstance(op, (Backward, BackwardWeight)):
            del held[op.stage][op.microbatch]
        elif isinstance(op, Update):
            current[op.stage] = op.version
    return peak + fixed


@dataclass
class _Replay:
    layout: Layout
    operations: Operations
    costs: Sequence[StageCosts]
    links: Links
    speeds: Callable[[int], float]
    ops: list[SimulatedOp] = field(default_factory=list)

    def run(self) -> None:
        self.next = dict.fromkeys(self.operations, 0)
        self.free_s = dict.fromkeys(self.operations, 0.0)
        self.channel_free_s: dict[tuple[int, int], float] = {}
        self.arrival_s: dict[tuple[str, int, int], float] = {}
        self.ready_to_update: dict[tuple[int, int], dict[int, float]] = {}
        pending = set(self.operations)
        while pending:
            moved = {worker for worker in sorted(pending) if self._advance(worker)}
            pending = {w for w in pending if self.next[w] < len(self.operations[w])}
            if pending and not moved:
                stuck = {w: self.operations[w][self.next[w]] for w in sorted(pending)}
                raise PlanError(f"the schedule stops: every worker waits for another: {stuck}")

    def _advance(self, worker: int) -> bool:
        """Run the worker's operations as long as their inputs are available."""
        moved = False
        ops = self.operations[worker]
        while self.next[worker] < len(ops):
            op = ops[self.next[worker]]
            done = self._update(worker, op) if isinstance(op, Update) else self._compute(worker, op)
            if not done:
                break
            moved = True
        return moved

    def _compute(self, worker: int, op: Forward | Backward | BackwardInput | BackwardWeight) -> bool:
        arrival = self._input_s(op)
        if arrival is None:
            return False
        start = max(self.free_s[worker], arrival)
        end = start + self._seconds(op) / self.speeds(worker)
        self._finish(worker, op, start, end)
        self._send(worker, op, end)
        return True

    def _input_s(self, op: Forward | Backward | BackwardInput | BackwardWeight) -> float | None:
        last = len(self.layout.stages) - 1
        if isinstance(op, Forward):
            return self.arrival_s.get(("forward", op.stage, op.microbatch)) if op.stage else 0.0
        if isinstance(op, BackwardWeight) or op.stage == last:
            return 0.0
        return self.arrival_s.get(("backward", op.stage, op.microbatch))

    def _seconds(self, op: Forward | Backward | BackwardInput | BackwardWeight) -> float:
        cost = self.costs[op.stage]
        match op:
            case Forward():
                return cost.forward_s
            case Backward():
                return cost.backward_s
            case BackwardInput():
                return cost.backward_s * (1 - cost.weight_share)
            case BackwardWeight():
                return cost.backward_s * cost.weight_share

    def _send(self, worker: int, op: Op, end_s: float) -> None:
        if isinstance(op, Forward) and op.stage + 1 < len(self.layout.stages):
            receiver = self.layout.worker(op.stage + 1, op.microbatch)
            size = self.costs[op.stage].output_bytes
            arrival = self._transfer(worker, receiver, size, end_s)
            self.arrival_s["forward", op.stage + 1, op.microbatch] = arrival
        elif isinstance(op, (Backward, BackwardInput)) and op.stage > 0:
            receiver = self.layout.worker(op.stage - 1, op.microbatch)
            size = self.costs[op.stage - 1].output_bytes
            arrival = self._transfer(worker, receiver, size, end_s)
            self.arrival_s["backward", op.stage - 1, op.microbatch] = arrival

    def _transfer(self, sender: int, receiver: int, size: float, ready_s: float) -> float:
        if sender == receiver:
            return ready_s
        start = max(ready_s, self.channel_free_s.get((sender, receiver), 0.0))
        arrival = start + self.links(sender, receiver).seconds(size)
        self.channel_free_s[sender, receiver] = arrival
        return arrival

    def _update(self, worker: int, op: Update) -> bool:
        """Run an update on all replicas at once, when the last of them has reached it."""
        waiting = self.ready_to_update.setdefault((op.stage, op.version), {})
        waiting[worker] = self.free_s[worker]
        if len(waiting) < self.layout.replicas(op.stage):
            return False
        start = max(waiting.values())
        for replica in waiting:
            self._finish(replica, op, start, start + self.costs[op.stage].update_s)
        return True

    def _finish(self, worker: int, op: Op, start: float, end: float) -> None:
        self.ops.append(SimulatedOp(worker, start, end, op))
        self.free_s[worker] = end
        self.next[worker] += 1
