"""Planning again while a job runs: the same kind of plan for other devices, or for other speeds of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plait.core.errors import PlanError
from plait.planner.memory import MemorySettings
from plait.planner.partition.front import Settings
from plait.planner.plans import data_parallel_plan, fastest_plan, make_plan, model_parallel_plan
from plait.planner.predict import predict
from plait.planner.schedules.kinds import Schedule
from plait.schema.plans.cluster import LEAST, Cluster, Device
from plait.schema.plans.graph import Graph
from plait.schema.plans.plan import Plan


def plan_for(plan: Plan, graph: Graph, speeds: Sequence[float]) -> Plan:
    """`plan` anew for devices of these speeds (1 as profiled), with the same schedule and microbatches.

    Each of the devices has a part in it. A plan without replicas stays one where that can be.
    """
    machines = on_devices(plan, speeds).machines
    memory = MemorySettings(plan.optimizer_copies, plan.recompute)
    chunks = max(2, len(plan.stages) // plan.devices_used)
    asked = Settings(plan.schedule, plan.microbatches, memory=memory, chunks=chunks)
    straight = replace(asked, straight=True)
    ways: list[tuple[Callable[[Graph, Cluster, Settings], Plan], Settings]]
    if plan.schedule is Schedule.NONE:
        ways = [(model_parallel_plan, asked)]
    elif all(stage.replicas == 1 for stage in plan.stages):
        ways = [(make_plan, straight), (fastest_plan, asked), (data_parallel_plan, asked)]
    else:
        ways = [(fastest_plan, asked), (make_plan, straight), (data_parallel_plan, asked)]
    for make, settings in ways:
        with contextlib.suppress(PlanError):
            found = make(graph, machines, settings)
            if found.devices_used == machines.count:
                return replace(found, microbatch_samples=plan.microbatch_samples)
    raise PlanError(
        f"no plan uses all of {len(speeds)} workers under schedule {plan.schedule.value}; use fewer workers "
        f"(parallel.max_workers), or another schedule"
    )


def on_devices(plan: Plan, speeds: Sequence[float]) -> Plan:
    """`plan` as it is on devices of these speeds, in number as many as it uses or others."""
    known = plan.machines
    same = len(speeds) == known.count
    levels = known.levels if same else (known.flat(len(speeds)),)
    memory = [known.device(i).memory_bytes for i in range(known.count)]
    limits = memory if same else [min((m for m in memory if m is not None), default=None)] * len(speeds)
    devices = tuple(Device(max(speed, LEAST), limit) for speed, limit in zip(speeds, limits))
    alike = all(speed == 1.0 for speed in speeds) and not known.devices
    return replace(plan, machines=replace(known, levels=levels, devices=() if alike else devices))


def seconds_of_devices(plan: Plan) -> tuple[float, ...]:
    """What each device that a plan uses computes of one step, in seconds as profiled, whatever its speed is.

    Where a plan leaves devices out, those that it uses come first.
    """
    found = [0.0] * plan.machines.count
    for stage in plan.stages:
        share = plan.microbatches / len(stage.devices)
        for device in stage.devices:
            found[device] += share * (stage.compute_s + plan.machines.overhead_s)
            if plan.schedule.synchronous:
                found[device] += stage.update_s
    return tuple(found[: plan.devices_used])


@dataclass(frozen=True)
class Replanned:
    """A plan for the speeds that were measured, what a step takes under it, and under the plan before."""

    plan: Plan
    step_s: float
    before_s: float
    moved_bytes: float


def replan(plan: Plan, graph: Graph, speeds: Sequence[float]) -> Replanned:
    """The plan for devices of these speeds, beside the one that runs on them now."""
    found = plan_for(plan, graph, speeds)
    before_s = predict(on_devices(plan, speeds)).step_s
    return Replanned(found, predict(found).step_s, before_s, moved_bytes(plan, found, graph))


def moved_bytes(before: Plan, after: Plan, graph: Graph) -> float:
    """The weights and the optimizer's state that devices lack which have other layers than before."""
    sizes = {node.id: node.parameter_bytes + node.buffer_bytes for node in graph.nodes}
    copies = 1 + before.optimizer_copies
    return copies * sum(
        sizes.get(layer, 0.0)
        for device in range(after.machines.count)
        for layer in _layers_of(after, device) - _layers_of(before, device)
    )


def _layers_of(plan: Plan, device: int) -> set[str]:
    return {layer for stage in plan.stages if device in stage.devices for layer in stage.layers}
