"""Playing a schedule through: from an order for each replica of a stage to one for each worker.

All operations take one unit of time, updates none. What comes out is right whatever operations cost: it is
one order of all of them in which none needs a later one, and each worker keeps to its part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from plait.core.errors import PlanError
from plait.planner.schedules.operations import Backward, BackwardInput, BackwardWeight, Forward, Op, Update
from plait.schema.plans.plan import Layout

# What was computed, in which pipeline, by which stage, of which microbatch.
_Result = tuple[str, int, int, int]


class EverybodyWaits(PlanError):
    """No worker can go on."""


@dataclass
class Lane:
    """The operations of one replica of a stage, in order, and the worker that carries them out.

    They are asked for one by one, when those before are done. `pipeline` distinguishes the microbatches of
    several pipelines. Where backwards are split, the other half is done when there is time, at the
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
        """The next operation, which is done now."""
        op = self.head
        assert op is not None
        self._ahead = None
        self.held += isinstance(op, Forward) - isinstance(op, Backward)
        if isinstance(op, BackwardInput):
            self.weights.append(BackwardWeight(op.stage, op.microbatch, op.version))
        return op

    def take_weight(self) -> Op:
        """The weight gradient that has waited longest, which is done now."""
        self.held -= 1
        return self.weights.popleft()

    @property
    def has_room(self) -> bool:
        return self.room is None or self.held < self.room or not isinstance(self.head, Forward)


def played(layout: Layout, lanes: Sequence[Lane]) -> dict[int, list[Op]]:
    """What each worker of one pipeline does, in order; refuses lanes that leave everybody waiting."""
    found: dict[int, list[Op]] = {worker: [] for worker in layout.workers}
    for worker, op in play(lanes, len(layout.stages) - 1, layout.replicas):
        found[worker].append(op)
    return found


def play(lanes: Sequence[Lane], last: int, replicas: Callable[[int], int]) -> Iterator[tuple[int, Op]]:
    """All operations of `lanes` in one order, each with its worker.

    A worker does what can start, backwards before forwards and earlier microbatches before later ones,
    else a weight gradient. `last` is the last stage. An update is done once it is the next operation of as
    many lanes as its stage has `replicas`, and at once: who needs it never waits for other work.
    """
    by_worker: dict[int, list[Lane]] = {}
    for lane in lanes:
        by_worker.setdefault(lane.worker, []).append(lane)
    done: set[_Result] = set()
    while True:
        yield from _updates(lanes, replicas)
        taken = []
        for worker, own in by_worker.items():
            found = _next_of(own, last, done)
            if found is not None:
                taken.append(found)
                yield worker, found[1]
        if not taken:
            break
        # Results can be used from the next unit of time on.
        for pipeline, op in taken:
            _note(pipeline, op, done)
    waiting = {lane.worker: lane.head for lane in lanes if lane.head is not None}
    if waiting:
        raise EverybodyWaits(f"the schedule stops: every worker waits for another: {waiting}")


def _updates(lanes: Sequence[Lane], replicas: Callable[[int], int]) -> Iterator[tuple[int, Op]]:
    """The updates that all replicas of a stage have come to."""
    while True:
        waiting: dict[Update, list[Lane]] = {}
        for lane in lanes:
            if isinstance(lane.head, Update):
                waiting.setdefault(lane.head, []).append(lane)
        ready = [lane for op, own in waiting.items() if len(own) == replicas(op.stage) for lane in own]
        if not ready:
            return
        for lane in ready:
            yield lane.worker, lane.take()


def _next_of(own: Sequence[Lane], last: int, done: set[_Result]) -> tuple[int, Op] | None:
    """What a worker with these lanes does next, and in which pipeline; None: it waits."""
    ready = [lane for lane in own if lane.has_room and _can_start(lane, last, done)]
    if ready:
        lane = min(ready, key=lambda lane: _urgency(lane.head))
        return lane.pipeline, lane.take()
    left = [lane for lane in own if lane.weights]
    if left:
        lane = min(left, key=lambda lane: (lane.weights[0].microbatch, lane.weights[0].stage))
        return lane.pipeline, lane.take_weight()
    return None


def _urgency(op: Op | None) -> tuple[bool, int, int]:
    assert op is not None
    assert not isinstance(op, Update)
    return isinstance(op, Forward), op.microbatch, op.stage


def _can_start(lane: Lane, last: int, done: set[_Result]) -> bool:
    op, pipeline = lane.head, lane.pipeline
    if op is None or isinstance(op, Update):
        return False
    if isinstance(op, Forward):
        return op.stage == 0 or ("forward", pipeline, op.stage - 1, op.microbatch) in done
    # Where a lane goes through several stages, a backward may come before its own forward.
    if ("forward", pipeline, op.stage, op.microbatch) not in done:
        return False
    return op.stage == last or ("backward", pipeline, op.stage + 1, op.microbatch) in done


def _note(pipeline: int, op: Op, done: set[_Result]) -> None:
    """Remember what others need of a result, and forget what nobody does any more."""
    if isinstance(op, Forward):
        done.add(("forward", pipeline, op.stage, op.microbatch))
    elif isinstance(op, (Backward, BackwardInput)):
        done.discard(("forward", pipeline, op.stage, op.microbatch))
        done.discard(("backward", pipeline, op.stage + 1, op.microbatch))
        if op.stage > 0:
            done.add(("backward", pipeline, op.stage, op.microbatch))
