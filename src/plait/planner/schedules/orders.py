"""Schedules: pure functions from a layout and a number of microbatches to each worker's operations.

| schedule | order | versions | in flight on a replica of stage s |
| --- | --- | --- | --- |
| stash | 1F1B, an update after every round of backwards | as many as in flight | depth(s) |
| 2bw | 1F1B, an update after every batch, of `depth` rounds at least | 2 | depth(s) |
| flush | 1F1B, one update at the end | 1 | depth(s) |
| gpipe | all forwards, then all backwards, one update | 1 | all |
| interleaved | 1F1B over several stages per worker, one update | 1 | see `interleaved_depth` |
| zero-bubble | backwards split; weight gradients fill the gaps | 1 | depth of the whole pipeline |
| none | one microbatch at a time | 1 | 1 |

depth(s) is the number of devices from stage s on, divided by the replicas of s, rounded up: what keeps every
device busy (PipeDream's NOAM, per stage). A worker may hold several stages under any schedule: each stage
keeps its order, and thereby its versions and its memory; `merged_order` finds an order for the worker. Sends
and receives are implied by the layout: the other end is the worker of the previous or next stage, and since
every worker processes its microbatches in increasing order, both ends of each channel agree on the order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from plait.core.errors import PlanError
from plait.planner.schedules import several_stages
from plait.planner.schedules.in_flight import Schedule, in_flight
from plait.planner.schedules.merge_orders import ReplicaOrder, ScheduleDeadlock, merged_by_worker
from plait.planner.schedules.operations import Backward, Forward, Op, Operations, Update
from plait.schema.plans.plan import Layout


def operations(
    schedule: Schedule,
    layout: Layout,
    microbatches: int,
    depths: Mapping[int, int] | None = None,
    batch: int = 1,
    check: bool = True,
) -> Operations:
    """The operations of each worker, in order, for `microbatches` in the pipeline.

    Synchronous schedules end with one update: the microbatches are one batch. The others update continuously,
    2bw after at least `batch` microbatches. `depths` overrides how many microbatches the replicas of a stage
    have in flight; unless `check` is False, depths under which workers would deadlock raise an error.
    """
    if check:
        _check(schedule, layout, microbatches, depths or {})
    if schedule is Schedule.ZERO_BUBBLE:
        return several_stages.zero_bubble(layout, microbatches, depths or {})
    if schedule is Schedule.INTERLEAVED:
        return several_stages.interleaved(layout, microbatches, depths or {})
    lists: dict[tuple[int, int], list[Op]] = {}
    for stage, workers in enumerate(layout.stages):
        depth = in_flight(schedule, layout, stage, microbatches, depths)
        rounds = math.ceil(microbatches / len(workers))
        every = _rounds_between_updates(schedule, layout, stage, rounds, batch)
        for replica in range(len(workers)):
            lists[stage, replica] = _of_replica(
                schedule, stage, replica, len(workers), depth, every, microbatches
            )
    if layout.shared:
        return several_stages.merged(layout, lists, together=schedule.synchronous)
    by_worker = {layout.stages[stage][replica]: tuple(ops) for (stage, replica), ops in lists.items()}
    if depths and check:
        _check_progress(schedule, layout, by_worker, microbatches, depths)
    return by_worker


def batch_of_two_buffers(layout: Layout, least: int = 1) -> int:
    """Microbatches between two updates under 2bw: `least`, or enough that no stage spans three batches.

    Batches have one size for the whole pipeline, so that all replicas of a stage get equal numbers.
    """
    most = max(
        math.ceil(layout.devices_from(s) / layout.replicas(s)) * layout.replicas(s)
        for s in range(len(layout.stages))
    )
    common = math.lcm(*(layout.replicas(s) for s in range(len(layout.stages))))
    return math.ceil(max(most, least) / common) * common


def _of_replica(
    schedule: Schedule, stage: int, replica: int, replicas: int, depth: int, every: int, microbatches: int
) -> list[Op]:
    """The operations of one replica for a known number of microbatches."""
    order = one_forward_one_backward(
        stage,
        replica,
        replicas,
        depth,
        every,
        version=lambda microbatch: version_of(schedule, microbatch, replicas, depth, every),
        admits=lambda microbatch: microbatch < microbatches,
        total=lambda: microbatches,
        rounds=lambda: math.ceil(microbatches / replicas),
    )
    return list(order)


def one_forward_one_backward(
    stage: int,
    replica: int,
    replicas: int,
    depth: int,
    every: int,
    version: Callable[[int], int],
    admits: Callable[[int], bool],
    total: Callable[[], int],
    rounds: Callable[[], int],
) -> Iterator[Op]:
    """The 1F1B order of one replica of a stage.

    `depth` - 1 forwards come first, then a forward and a backward in turn, then the backwards that are left,
    with an update after `every` backwards. `version` gives the version of the weights that a microbatch uses.
    `admits` says whether it is one of the `total` microbatches, which may become fewer while they run, but
    not fewer than have started. Replicas with fewer microbatches than others take part in the last updates,
    those of `rounds` rounds.
    """
    versions: dict[int, int] = {}
    updates = backwards = 0
    for step in itertools.count():
        microbatch = replica + step * replicas
        if admits(microbatch):
            versions[step] = version(microbatch)
            yield Forward(stage, microbatch, versions[step])
        if step < depth - 1:
            continue
        if backwards >= len(range(replica, total(), replicas)):
            break
        yield Backward(stage, replica + backwards * replicas, versions.pop(backwards))
        backwards += 1
        if backwards % every == 0:
            updates += 1
            yield Update(stage, updates)
    while updates * every < rounds():
        updates += 1
        yield Update(stage, updates)


def _rounds_between_updates(schedule: Schedule, layout: Layout, stage: int, rounds: int, batch: int) -> int:
    if schedule is Schedule.STASH:
        return 1
    if schedule is Schedule.TWO_BUFFERED:
        return batch_of_two_buffers(layout, batch) // layout.replicas(stage)
    return rounds


def version_of(schedule: Schedule, microbatch: int, replicas: int, depth: int, every: int) -> int:
    """The version of the weights of a stage that a microbatch uses."""
    if schedule is Schedule.STASH:
        return max(0, microbatch // replicas - depth + 1)
    if schedule is Schedule.TWO_BUFFERED:
        # One batch old in every stage, as the previous batch may still be in flight.
        return max(0, microbatch // replicas // every - 1)
    return 0


def _check(schedule: Schedule, layout: Layout, microbatches: int, depths: Mapping[int, int]) -> None:
    if microbatches < 1:
        raise PlanError(f"found {microbatches} microbatches, expected at least 1")
    for stage, depth in depths.items():
        if not (0 <= stage < len(layout.stages)) or depth < 1:
            raise PlanError(
                f"found depth {depth} for stage {stage}, expected at least 1 for a stage "
                f"below {len(layout.stages)}"
            )


def least_depth(layout: Layout, stage: int, depth_behind: int, updates: bool) -> int:
    """The fewest microbatches in flight with which `stage` does not block the next stage.

    Before its backward of b, a replica of the next stage (R' replicas, d' in flight) has run the forward of b
    + R'(d' - 1). This stage (R replicas, d in flight) sends that one only after its backward of b + R'(d' -
    1) - R d, which must precede b. With `updates` after every round, as under stash, all backwards of that
    round must be done, as replicas wait for each other at updates.
    """
    ahead, replicas = layout.replicas(stage + 1) * (depth_behind - 1), layout.replicas(stage)
    return (math.ceil(ahead / replicas) if updates else ahead // replicas) + 1


def _check_progress(
    schedule: Schedule, layout: Layout, lists: Operations, microbatches: int, depths: Mapping[int, int]
) -> None:
    """Raise PlanError for depths under which workers deadlock, found by simulating them."""
    replicas = [ReplicaOrder(worker, iter(ops)) for worker, ops in lists.items()]
    try:
        merged_by_worker(layout, replicas)
    except ScheduleDeadlock:
        _name_shallow_stage(schedule, layout, microbatches, depths)
        raise PlanError(
            f"depths {dict(depths)} leave all workers of schedule {schedule.value} waiting for each other; "
            f"give earlier stages more, or leave them out"
        ) from None


def _name_shallow_stage(
    schedule: Schedule, layout: Layout, microbatches: int, depths: Mapping[int, int]
) -> None:
    """Raise PlanError with the first stage that has too few microbatches in flight for the next stage."""
    for stage in range(len(layout.stages) - 1):
        depth = in_flight(schedule, layout, stage, microbatches, depths)
        behind = in_flight(schedule, layout, stage + 1, microbatches, depths)
        needed = least_depth(layout, stage, behind, updates=schedule is Schedule.STASH)
        if depth < needed:
            raise PlanError(
                f"stage {stage} keeps {depth} microbatches in flight on each of {layout.replicas(stage)} "
                f"replicas, but stage {stage + 1} keeps {behind} on each of {layout.replicas(stage + 1)} "
                f"and would wait for ever; give stage {stage} at least {needed}"
            ) from None
