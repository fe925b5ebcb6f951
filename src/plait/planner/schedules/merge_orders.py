"""Merges the operation orders of stage replicas into one order per worker, by simulating the schedule.

All operations take one unit of time, updates none. The result is valid for any costs: it is an order of all
operations in which none depends on a later one, and each worker follows its part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from plait.core.errors import PlanError
from plait.planner.schedules.operations import Backward, BackwardInput, BackwardWeight, Forward, Op, Update
from plait.schema.plans.plan import Layout

# What was computed, the pipeline, the stage, the microbatch.
_Result = tuple[str, int, int, int]


class ScheduleDeadlock(PlanError):
    """Deadlock: every worker waits for another."""


@dataclass
class ReplicaOrder:
    """The operations of one replica of a stage, in order, and its worker.

    They are read one by one, when the earlier ones are done. `pipeline` distinguishes the microbatches of
    several pipelines. With split backwards, the weight gradients are computed when the worker is idle, at the
    latest when `room` microbatches are held.
    """

    worker: int
    ops: Iterator[Op]
    pipeline: int = 0
    room: int | None = None
    weights: deque[BackwardWeight] = field(default_factory=deque)
    held: int = 0
    _ahead: Op | None = None

    @property
    def head(self) -> Op | None:
        """The next operation; None at the end."""
        if self._ahead is None:
            self._ahead = next(self.ops, None)
        return self._ahead

    def take(self) -> Op:
        """Remove and return the next operation."""
        op = self.head
        assert op is not None
        self._ahead = None
        self.held += isinstance(op, Forward) - isinstance(op, Backward)
        if isinstance(op, BackwardInput):
            self.weights.append(BackwardWeight(op.stage, op.microbatch, op.version))
        return op

    def take_weight(self) -> Op:
        """Remove and return the oldest deferred weight gradient."""
        self.held -= 1
        return self.weights.popleft()

    @property
    def has_room(self) -> bool:
        return self.room is None or self.held < self.room or not isinstance(self.head, Forward)


def merged_by_worker(layout: Layout, orders: Sequence[ReplicaOrder]) -> dict[int, list[Op]]:
    """The operations of each worker of one pipeline, in order; raises for orders that deadlock."""
    operations: dict[int, list[Op]] = {worker: [] for worker in layout.workers}
    for worker, op in merged_order(orders, len(layout.stages) - 1, layout.replicas):
        operations[worker].append(op)
    return operations


def merged_order(
    orders: Sequence[ReplicaOrder], last: int, replicas: Callable[[int], int]
) -> Iterator[tuple[int, Op]]:
    """All operations of `orders` in one order, each with its worker.

    A worker runs what can start, backwards before forwards and earlier microbatches before later ones,
    otherwise a weight gradient. `last` is the last stage. An update runs as soon as it is the next operation
    of all `replicas` of its stage.
    """
    by_worker: dict[int, list[ReplicaOrder]] = {}
    for ops in orders:
        by_worker.setdefault(ops.worker, []).append(ops)
    done: set[_Result] = set()
    while True:
        yield from _updates(orders, replicas)
        started = []
        for worker, of_worker in by_worker.items():
            chosen = _next_of(of_worker, last, done)
            if chosen is not None:
                started.append(chosen)
                yield worker, chosen[1]
        if not started:
            break
        # Results are available from the next unit of time on.
        for pipeline, op in started:
            _record(pipeline, op, done)
    waiting = {ops.worker: ops.head for ops in orders if ops.head is not None}
    if waiting:
        raise ScheduleDeadlock(f"the schedule stops: every worker waits for another: {waiting}")


def _updates(orders: Sequence[ReplicaOrder], replicas: Callable[[int], int]) -> Iterator[tuple[int, Op]]:
    """The updates that all replicas of a stage have reached."""
    while True:
        waiting: dict[Update, list[ReplicaOrder]] = {}
        for ops in orders:
            if isinstance(ops.head, Update):
                waiting.setdefault(ops.head, []).append(ops)
        ready = [
            ops
            for op, waiting_ops in waiting.items()
            if len(waiting_ops) == replicas(op.stage)
            for ops in waiting_ops
        ]
        if not ready:
            return
        for ops in ready:
            yield ops.worker, ops.take()


def _next_of(orders: Sequence[ReplicaOrder], last: int, done: set[_Result]) -> tuple[int, Op] | None:
    """The next operation of a worker that holds these replicas, and its pipeline; None if it waits."""
    ready = [ops for ops in orders if ops.has_room and _can_start(ops, last, done)]
    if ready:
        ops = min(ready, key=lambda ops: _urgency(ops.head))
        return ops.pipeline, ops.take()
    left = [ops for ops in orders if ops.weights]
    if left:
        ops = min(left, key=lambda ops: (ops.weights[0].microbatch, ops.weights[0].stage))
        return ops.pipeline, ops.take_weight()
    return None


def _urgency(op: Op | None) -> tuple[bool, int, int]:
    assert op is not None
    assert not isinstance(op, Update)
    return isinstance(op, Forward), op.microbatch, op.stage


def _can_start(ops: ReplicaOrder, last: int, done: set[_Result]) -> bool:
    op, pipeline = ops.head, ops.pipeline
    if op is None or isinstance(op, Update):
        return False
    if isinstance(op, Forward):
        return op.stage == 0 or ("forward", pipeline, op.stage - 1, op.microbatch) in done
    # If a worker has several stages, a backward may be listed before its forward.
    if ("forward", pipeline, op.stage, op.microbatch) not in done:
        return False
    return op.stage == last or ("backward", pipeline, op.stage + 1, op.microbatch) in done


def _record(pipeline: int, op: Op, done: set[_Result]) -> None:
    """Record a result that others need, and drop those that are no longer needed."""
    if isinstance(op, Forward):
        done.add(("forward", pipeline, op.stage, op.microbatch))
    elif isinstance(op, (Backward, BackwardInput)):
        done.discard(("forward", pipeline, op.stage, op.microbatch))
        done.discard(("backward", pipeline, op.stage + 1, op.microbatch))
        if op.stage > 0:
            done.add(("backward", pipeline, op.stage, op.microbatch))
