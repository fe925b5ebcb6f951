"""Schedules that need more than an order per stage: zero-bubble, and workers with several stages."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from plait.core.errors import PlanError
from plait.planner.schedules.in_flight import Schedule, in_flight
from plait.planner.schedules.merge_orders import ReplicaOrder, ScheduleDeadlock, merged_by_worker
from plait.planner.schedules.operations import Backward, BackwardInput, Forward, Op, Operations, Update
from plait.schema.plans.plan import Layout

Turn = tuple[int, int]


def zero_bubble(layout: Layout, microbatches: int, depths: Mapping[int, int]) -> Operations:
    """1F1B with split backwards; weight gradients fill the gaps.

    The gaps are found by simulating the schedule with operations of equal length: actual costs affect only
    the quality of the result, not its correctness. A microbatch is in flight until its weight gradient is
    done; each replica may hold as many as the pipeline is deep, as in ZB-H1, which is no more than the first
    stage of 1F1B holds.
    """
    replicas = []
    for stage, ids in enumerate(layout.stages):
        room = in_flight(Schedule.ZERO_BUBBLE, layout, stage, microbatches, depths)
        depth = min(room, in_flight(Schedule.FLUSH, layout, stage, microbatches))
        for replica, worker in enumerate(ids):
            pairs = [(stage, b) for b in range(replica, microbatches, len(ids))]
            replicas.append(
                ReplicaOrder(worker, iter(alternate(pairs, pairs, depth, BackwardInput)), room=room)
            )
    try:
        return _with_updates(merged_by_worker(layout, replicas), layout)
    except ScheduleDeadlock:
        raise PlanError(
            f"depths {dict(depths)} leave some stage waiting for ever; give earlier stages more"
        ) from None


def interleaved(layout: Layout, microbatches: int, depths: Mapping[int, int]) -> Operations:
    """1F1B for workers with several stages each, in groups of as many microbatches as workers.

    If groups or stages are uneven, depths are increased until there is no deadlock.
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
        with contextlib.suppress(ScheduleDeadlock):
            return _with_updates(
                merged_by_worker(layout, [ReplicaOrder(w, iter(ops)) for w, ops in lists.items()]), layout
            )
    raise AssertionError("with all forwards before all backwards there is no deadlock")


def merged(layout: Layout, lists: Mapping[Turn, Sequence[Op]], together: bool) -> Operations:
    """One order per worker with several stages, from an order per stage and replica.

    Stages update according to their order, or all `together` at the end.
    """
    if together:
        lists = {key: [op for op in ops if not isinstance(op, Update)] for key, ops in lists.items()}
    replicas = [
        ReplicaOrder(layout.stages[stage][replica], iter(ops)) for (stage, replica), ops in lists.items()
    ]
    orders = merged_by_worker(layout, replicas)
    if together:
        return _with_updates(orders, layout)
    return {worker: tuple(ops) for worker, ops in orders.items()}


def interleaved_depth(layout: Layout, worker: int) -> int:
    """The microbatches in flight on a worker, counted once per stage.

    Twice the number of workers after it, plus a group for each additional stage.
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
    """Fill with `depth - 1` forwards, then alternate forward and backward, then drain."""
    ops: list[Op] = []
    fill = min(depth, len(forwards)) - 1
    for step in range(len(forwards) + fill):
        if step < len(forwards):
            ops.append(Forward(*forwards[step]))
        if step >= fill:
            ops.append(backward(*backwards[step - fill]))
    return ops


def _turns(layout: Layout, microbatches: int) -> tuple[dict[int, list[Turn]], dict[int, list[Turn]]]:
    """The forwards and backwards of each worker: by group, and within it by stage."""
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


def _with_updates(lists: Mapping[int, Sequence[Op]], layout: Layout) -> Operations:
    updates: dict[int, list[Op]] = {worker: [] for worker in lists}
    for stage, ids in enumerate(layout.stages):
        for worker in ids:
            updates[worker].append(Update(stage, 1))
    return {worker: (*ops, *updates[worker]) for worker, ops in lists.items()}
