"""The memory of a plan's stages as a job runs them, with the job's depths, recomputation and versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from plait.planner.plans import held_microbatches
from plait.planner.schedules.in_flight import Schedule, in_flight
from plait.planner.stage_memory import MemorySettings, stage_bytes
from plait.schema.plans.plan import Layout, Plan
from plait.schema.settings import PipelineOptions

# More microbatches than any pipeline has in flight.
_MANY = 1 << 40


def with_runtime_memory(plan: Plan, chosen: PipelineOptions) -> Plan:
    """`plan` with the microbatches in flight and the bytes of its stages as it is run."""
    layout = plan.layout()
    given = {**dict(enumerate(plan.depths)), **chosen.depths}
    share = math.ceil(plan.microbatches / plan.pipelines)
    held = held_microbatches(plan.schedule, layout, share, _all_depths(plan.schedule, layout, given))
    stages = []
    for number, stage in enumerate(plan.stages):
        memory = MemorySettings(plan.optimizer_copies, plan.recompute or number in chosen.recompute)
        count = None
        if chosen.vertical_sync and plan.schedule is Schedule.STASH:
            count = versions_of_vertical_sync(layout, number, given)
        run = replace(stage, in_flight=held[number])
        stages.append(replace(run, memory_bytes=stage_bytes(run, plan.schedule, memory, count)))
    return replace(plan, stages=tuple(stages))


def _all_depths(schedule: Schedule, layout: Layout, given: Mapping[int, int]) -> tuple[int, ...]:
    """The depth of every stage, if any is given at all."""
    if not given:
        return ()
    return tuple(in_flight(schedule, layout, s, _MANY, given) for s in range(len(layout.stages)))


def versions_of_vertical_sync(layout: Layout, stage: int, depths: Mapping[int, int]) -> int:
    """The maximum number of weight versions of a stage if a microbatch uses the same version in all stages.

    That is the version of the first stage when the microbatch entered, so a stage keeps all later ones: as
    many as the first stage has in flight, if they have equal replicas.
    """
    first, replicas = layout.replicas(0), layout.replicas(stage)
    deep = in_flight(Schedule.STASH, layout, 0, _MANY, depths)

    def entered(step: int) -> int:
        """The version of the microbatch that reaches the first replica in this step."""
        return max(0, step * replicas // first - deep + 1) * first // replicas

    # After update v the microbatch of step v is the oldest that is in flight or still to come. The number of
    # versions is periodic in the least common multiple of the replicas.
    begin, period = 2 * deep * first, math.lcm(first, replicas)
    return max(v + 1 - entered(v) for v in range(begin, begin + period))
