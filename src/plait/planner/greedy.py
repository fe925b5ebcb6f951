"""Schedules found by playing them through: interleaved stages and zero-bubble.

Each worker has queues of forwards, backwards and weight gradients in a fixed order. Time goes in units;
a worker takes the next backward if its gradient has come, else the next forward if it has room, else a
weight gradient. What it took, in order, is its schedule: costs decide only how well it fits, never
whether it is right.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
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


@dataclass
class _Worker:
    """The queues of one worker, as (stage, microbatch), and how many it may have in flight."""

    room: int
    forwards: deque[tuple[int, int]] = field(default_factory=deque)
    backwards: deque[tuple[int, int]] = field(default_factory=deque)
    weights: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: int = 0
    ops: list[Op] = field(default_factory=list)


def zero_bubble(layout: Layout, microbatches: int, depths: Mapping[int, int]) -> Operations:
    """Backwards in two halves; the halves that nobody waits for fill the gaps.

    A microbatch counts as in flight until its weight gradient is done. Each replica may hold as many as
    the pipeline is deep, as in ZB-H1: no more than the first stage of 1F1B holds.
    """
    workers: dict[int, _Worker] = {}
    for stage, ids in enumerate(layout.stages):
        room = in_flight(Schedule.ZERO_BUBBLE, layout, stage, microbatches, depths)
        for replica, worker in enumerate(ids):
            own = [(stage, b) for b in range(replica, microbatches, len(ids))]
            workers[worker] = _Worker(room, deque(own), deque(own))
    if not _play(workers, len(layout.stages), split=True):
        raise PlanError(f"depths {dict(depths)} leave some stage waiting for ever; give earlier stages more")
    return _finish(workers, layout)


def interleaved(layout: Layout, microbatches: int, depths: Mapping[int, int]) -> Operations:
    """1F1B for workers that hold several stages each, in groups of as many microbatches as workers."""
    if depths:
        raise PlanError("schedule interleaved sets its own depths; leave them out")
    if any(len(workers) != 1 for workers in layout.stages):
        raise PlanError(
            f"schedule interleaved: found replicated stages {layout.stages}, expected one worker for each; "
            f"use several pipelines side by side instead"
        )
    for extra in range(microbatches * len(layout.stages) + 1):
        workers = _interleaved_queues(layout, microbatches, extra)
        if _play(workers, len(layout.stages), split=False):
            return _finish(workers, layout)
    raise AssertionError("with room for everything no worker waits for ever")


def interleaved_depth(layout: Layout, worker: int) -> int:
    """Microbatches times stages that a worker keeps in flight: twice the workers behind it, and a group
    of microbatches for each further stage it holds."""
    names = [workers[0] for workers in layout.stages]
    order = list(dict.fromkeys(names))
    held = names.count(worker)
    return 2 * (len(order) - order.index(worker) - 1) + (held - 1) * len(order) + 1


def _interleaved_queues(layout: Layout, microbatches: int, extra: int) -> dict[int, _Worker]:
    group = len(layout.workers)
    workers = {w: _Worker(interleaved_depth(layout, w) + extra) for w in layout.workers}
    turns = [
        (start // group, index, stage, b)
        for start in range(0, microbatches, group)
        for stage, index in _turns(layout)
        for b in range(start, min(start + group, microbatches))
    ]
    last_turn = max(index for _, index in _turns(layout))
    for _, _, stage, b in sorted(turns):
        workers[layout.stages[stage][0]].forwards.append((stage, b))
    for _, _, stage, b in sorted((g, last_turn - index, s, b) for g, index, s, b in turns):
        workers[layout.stages[stage][0]].backwards.append((stage, b))
    return workers


def _turns(layout: Layout) -> list[tuple[int, int]]:
    """Each stage with how many stages its worker holds before it."""
    seen: dict[int, int] = {}
    turns = []
    for stage, (worker,) in enumerate(layout.stages):
        turns.append((stage, seen.get(worker, 0)))
        seen[worker] = seen.get(worker, 0) + 1
    return turns


def _play(workers: Mapping[int, _Worker], stages: int, split: bool) -> bool:
    """Let the workers empty their queues; False when all of them wait."""
    forward_at: dict[tuple[int, int], int] = {}
    backward_at: dict[tuple[int, int], int] = {}
    now = 0
    while any(w.forwards or w.backwards or w.weights for w in workers.values()):
        acted = [_act(w, now, stages, split, forward_at, backward_at) for w in workers.values()]
        if not any(acted) and now not in set(forward_at.values()) | set(backward_at.values()):
            return False
        now += 1
    return True


def _act(
    worker: _Worker,
    now: int,
    stages: int,
    split: bool,
    forward_at: dict[tuple[int, int], int],
    backward_at: dict[tuple[int, int], int],
) -> bool:
    """One unit of one worker's time; the dictionaries say from when on a result can be used."""
    if worker.backwards:
        stage, b = worker.backwards[0]
        gradient = (stage + 1, b) if stage + 1 < stages else None
        own_forward = forward_at.get((stage, b), math.inf) <= now
        if own_forward and (gradient is None or backward_at.get(gradient, math.inf) <= now):
            worker.backwards.popleft()
            backward_at[stage, b] = now + 1
            worker.ops.append(BackwardInput(stage, b) if split else Backward(stage, b))
            if split:
                worker.weights.append((stage, b))
            else:
                worker.in_flight -= 1
            return True
    if worker.forwards and worker.in_flight < worker.room:
        stage, b = worker.forwards[0]
        if stage == 0 or forward_at.get((stage - 1, b), math.inf) <= now:
            worker.forwards.popleft()
            forward_at[stage, b] = now + 1
            worker.in_flight += 1
            worker.ops.append(Forward(stage, b))
            return True
    if worker.weights:
        worker.ops.append(BackwardWeight(*worker.weights.popleft()))
        worker.in_flight -= 1
        return True
    return False


def _finish(workers: Mapping[int, _Worker], layout: Layout) -> Operations:
    for stage, ids in enumerate(layout.stages):
        for worker in ids:
            workers[worker].ops.append(Update(stage, 1))
    return {worker: tuple(state.ops) for worker, state in workers.items()}
