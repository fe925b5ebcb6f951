"""Replanning of a running job: the same kind of plan for other devices, or for other speeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plait.core.errors import PlanError
from plait.planner.partition.partitioner import Settings
from plait.planner.plans import data_parallel_plan, fastest_plan, make_plan, model_parallel_plan
from plait.planner.predict import predict
from plait.planner.schedules.in_flight import Schedule
from plait.planner.stage_memory import MemorySettings
from plait.schema.plans.cluster import LEAST, Cluster, Device
from plait.schema.plans.graph import Graph
from plait.schema.plans.plan import Plan


def plan_for(plan: Plan, graph: Graph, speeds: Sequence[float]) -> Plan:
    """A new plan for devices of these speeds (1 as profiled), with the schedule and microbatches of `plan`.

    It uses all of the devices. A plan without replicas stays one if possible.
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
            made = make(graph, machines, settings)
            if made.devices_used == machines.count:
                return replace(made, microbatch_samples=plan.microbatch_samples)
    raise PlanError(
        f"no plan uses all of {len(speeds)} workers under schedule {plan.schedule.value}; use fewer workers "
        f"(parallel.max_workers), or another schedule"
    )


def on_devices(plan: Plan, speeds: Sequence[float]) -> Plan:
    """`plan` on devices of these speeds, whose number may differ from the plan's."""
    known = plan.machines
    same = len(speeds) == known.count
    levels = known.levels if same else (known.flat(len(speeds)),)
    memory = [known.device(i).memory_bytes for i in range(known.count)]
    limits = memory if same else [min((m for m in memory if m is not None), default=None)] * len(speeds)
    devices = tuple(Device(max(speed, LEAST), limit) for speed, limit in zip(speeds, limits))
    alike = all(speed == 1.0 for speed in speeds) and not known.devices
    return replace(plan, machines=replace(known, levels=levels, devices=() if alike else devices))


def seconds_of_devices(plan: Plan) -> tuple[float, ...]:
    """The compute seconds of each device per step, as profiled, whatever its speed.

    If a plan does not use all devices, the used ones are first.
    """
    seconds = [0.0] * plan.machines.count
    for stage in plan.stages:
        share = plan.microbatches / len(stage.devices)
        for device in stage.devices:
            seconds[device] += share * (stage.compute_s + plan.machines.overhead_s)
            if plan.schedule.synchronous:
                seconds[device] += stage.update_s
    return tuple(seconds[: plan.devices_used])


@dataclass(frozen=True)
class Replanned:
    """A plan for the measured speeds, its predicted step time, and that of the current plan."""

    plan: Plan
    step_s: float
    before_s: float
    moved_bytes: float


def replan(plan: Plan, graph: Graph, speeds: Sequence[float]) -> Replanned:
    """The plan for devices of these speeds, compared with the current one."""
    new = plan_for(plan, graph, speeds)
    before_s = predict(on_devices(plan, speeds)).step_s
    return Replanned(new, predict(new).step_s, before_s, moved_bytes(plan, new, graph))


def moved_bytes(before: Plan, after: Plan, graph: Graph) -> float:
    """The bytes of weights and optimizer state that devices need for layers that they did not have before."""
    sizes = {node.id: node.parameter_bytes + node.buffer_bytes for node in graph.nodes}
    copies = 1 + before.optimizer_copies
    return copies * sum(
        sizes.get(layer, 0.0)
        for device in range(after.machines.count)
        for layer in _layers_of(after, device) - _layers_of(before, device)
    )


def _layers_of(plan: Plan, device: int) -> set[str]:
    return {layer for stage in plan.stages if device in stage.devices for layer in stage.layers}
