"""Schedules that go beyond one stage's own order: zero-bubble, and workers that hold several stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.planner.depth import Schedule, in_flight
from plait.planner.errors import PlanError
from plait.planner.operations import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Layout,
    Op,
    Operations,
    Update,
)

Turn = tuple[int, int]


def zero_bubble(layout: Layout, microbatches: int, depths: Mapping[int, int]) -> Operations:
    """1F1B with backwards in two halves; the half that nobody waits for fills the gaps.

    Which gaps there are is found by playing the schedule through with operations of one length each: costs
    decide only how well the result fits, never whether it is right. A microbatch is in flight until its
    weight gradient is done; each replica may hold as many as the pipeline is deep, as in ZB-H1, which is
    no more than the first stage of 1F1B holds.
    """
    workers: dict[int, _Worker] = {}
    for stage, ids in enumerate(layout.stages):
        room = in_flight(Schedule.ZERO_BUBBLE, layout, stage, microbatches, depths)
        depth = min(room, in_flight(Schedule.FLUSH, layout, stage, microbatches))
        for replica, worker in enumerate(ids):
            own = [(stage, b) for b in range(replica, microbatches, len(ids))]
            main = alternate(own, own, depth, BackwardInput)
            workers[worker] = _Worker(room, deque(main))
    if not _play(workers, len(layout.stages)):
        raise PlanError(f"depths {dict(depths)} leave some stage waiting for ever; give earlier stages more")
    return _with_updates({worker: state.ops for worker, state in workers.items()}, layout)


def interleaved(layout: Layout, microbatches: int, depths: Mapping[int, int]) -> Operations:
    """1F1B for workers that hold several stages each, in groups of as many microbatches as workers.

    Where groups or stages do not come out even, workers go a little deeper, until nobody waits for ever.
    """
    if depths:
        raise PlanError("schedule interleaved sets its own depths; leave them out")
    if any(len(workers) != 1 for workers in layout.stages):
        raise PlanError(
            f"schedule interleaved: found replicated stages {layout.stages}, expected one worker for each; "
            f"use several pipelines side by side instead"
        )
    forwards, backwards = _turns(layout, microbatches)
    for extra in range(microbatches * len(layout.stages) + 1):
        lists = {
            w: alternate(forwards[w], backwards[w], interleaved_depth(layout, w) + extra, Backward)
            for w in layout.workers
        }
        if _play({w: _Worker(len(ops), deque(ops)) for w, ops in lists.items()}, len(layout.stages)):
            return _with_updates(lists, layout)
    raise AssertionError("with all forwards before all backwards nobody waits for ever")


def merged(layout: Layout, lists: Mapping[Turn, Sequence[Op]]) -> Operations:
    """One order for each worker that holds several stages, from an order for each stage and replica.

    Found by playing them through with operations of one length each: a worker does what can start,
    backwards before forwards and earlier microbatches before later ones.
    """
    waiting: dict[int, list[deque[Op]]] = {worker: [] for worker in layout.workers}
    for (stage, replica), ops in lists.items():
        waiting[layout.stages[stage][replica]].append(deque(ops))
    orders: dict[int, list[Op]] = {worker: [] for worker in layout.workers}
    done: set[tuple[str, int, int]] = set()
    while any(ops for own in waiting.values() for ops in own):
        taken = []
        for worker, own in waiting.items():
            ready = [ops for ops in own if ops and _has_input(ops[0], len(layout.stages), done)]
            if ready:
                op = min(ready, key=lambda ops: _urgency(ops[0])).popleft()
                orders[worker].append(op)
                taken.append(op)
        assert taken, "each stage's order by itself leaves nobody waiting for ever"
        done |= {_key(op) for op in taken}
    return _with_updates(orders, layout)


def _urgency(op: Op) -> tuple[bool, int, int]:
    assert not isinstance(op, Update)
    return isinstance(op, Forward), op.microbatch, op.stage


def interleaved_depth(layout: Layout, worker: int) -> int:
    """Microbatches, counted once for each stage, that a worker keeps in flight.

    Twice as many as workers follow it, and a group for each further stage that it holds.
    """
    names = [workers[0] for workers in layout.stages]
    order = list(dict.fromkeys(names))
    return 2 * (len(order) - order.index(worker) - 1) + (names.count(worker) - 1) * len(order) + 1


def alternate(
    forwards: Sequence[Turn],
    backwards: Sequence[Turn],
    depth: int,
    backward: type[Backward] | type[BackwardInput],
) -> list[Op]:
    """Fill with `depth` forwards less one, then a forward and a backward in turn, then drain."""
    ops: list[Op] = []
    fill = min(depth, len(forwards)) - 1
    for step in range(len(forwards) + fill):
        if step < len(forwards):
            ops.append(Forward(*forwards[step]))
        if step >= fill:
            ops.append(backward(*backwards[step - fill]))
    return ops


def _turns(layout: Layout, microbatches: int) -> tuple[dict[int, list[Turn]], dict[int, list[Turn]]]:
    """The forwards and the backwards of each worker: group by group, and in it stage by stage."""
    group = len(layout.workers)
    forwards: dict[int, list[Turn]] = {worker: [] for worker in layout.workers}
    backwards: dict[int, list[Turn]] = {worker: [] for worker in layout.workers}
    stages = list(range(len(layout.stages)))
    for start in range(0, microbatches, group):
        together = range(start, min(start + group, microbatches))
        for stage in stages:
            forwards[layout.stages[stage][0]] += [(stage, b) for b in together]
        for stage in reversed(stages):
            backwards[layout.stages[stage][0]] += [(stage, b) for b in together]
    return forwards, backwards


@dataclass
class _Worker:
    """What one worker has still to do, the weight gradients it may do at any time, and its room."""

    room: int
    main: deque[Op]
    weights: deque[Turn] = field(default_factory=deque)
    in_flight: int = 0
    ops: list[Op] = field(default_factory=list)


def _play(workers: Mapping[int, _Worker], stages: int) -> bool:
    """Let the workers do all they have, a unit of time for each operation; False when all wait."""
    done: set[tuple[str, int, int]] = set()
    while any(worker.main or worker.weights for worker in workers.values()):
        taken = [op for worker in workers.values() if (op := _act(worker, stages, done)) is not None]
        if not taken:
            return False
        # Results can be used from the next unit of time on.
        done |= {_key(op) for op in taken}
    return True


def _key(op: Op) -> tuple[str, int, int]:
    kind = {Forward: "forward", Backward: "backward", BackwardInput: "backward"}.get(type(op), "weight")
    assert not isinstance(op, Update)
    return kind, op.stage, op.microbatch


def _act(worker: _Worker, stages: int, done: set[tuple[str, int, int]]) -> Op | None:
    """The next operation of a worker: its main one if it can start, else a weight gradient."""
    if worker.main:
        op = worker.main[0]
        blocked = isinstance(op, Forward) and worker.in_flight >= worker.room
        if not blocked and _has_input(op, stages, done):
            worker.main.popleft()
            worker.ops.append(op)
            worker.in_flight += isinstance(op, Forward) - isinstance(op, Backward)
            if isinstance(op, BackwardInput):
                worker.weights.append((op.stage, op.microbatch))
            return op
    if worker.weights:
        weight = BackwardWeight(*worker.weights.popleft())
        worker.ops.append(weight)
        worker.in_flight -= 1
        return weight
    return None


def _has_input(op: Op, stages: int, done: set[tuple[str, int, int]]) -> bool:
    assert not isinstance(op, Update)
    if isinstance(op, Forward):
        return op.stage == 0 or ("forward", op.stage - 1, op.microbatch) in done
    # The own forward comes earlier in the same list, but on its last stage only just.
    if ("forward", op.stage, op.microbatch) not in done:
        return False
    return op.stage == stages - 1 or ("backward", op.stage + 1, op.microbatch) in done


def _with_updates(lists: Mapping[int, Sequence[Op]], layout: Layout) -> Operations:
    updates: dict[int, list[Op]] = {worker: [] for worker in lists}
    for stage, ids in enumerate(layout.stages):
        for worker in ids:
            updates[worker].append(Update(stage, 1))
    return {worker: (*ops, *updates[worker]) for worker, ops in lists.items()}
