"""Predictions of a plan: its schedule simulated, and data and model parallelism for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.orders import batch_of_two_buffers, least_depth, operations
from plait.planner.schedules.simulator import SimulatedLink, Simulation, StageCosts, simulate
from plait.planner.stage_memory import MemorySettings, memory_parts
from plait.schema.plans.cluster import Cluster
from plait.schema.plans.graph import Graph
from plait.schema.plans.plan import Layout, Plan, Stage


@dataclass(frozen=True)
class Prediction:
    """Seconds per batch, the idle share, and the peak memory of the fullest device."""

    step_s: float
    idle_share: float
    peak_bytes: float
    simulation: Simulation


def predict(plan: Plan) -> Prediction:
    """Simulate one pipeline of `plan`.

    Asynchronous schedules, which never drain, are timed in their steady state.
    """
    machines, layout, schedule, depths = plan.machines, plan.layout(), plan.schedule, plan.depths
    microbatches = math.ceil(plan.microbatches / plan.pipelines)
    memory = MemorySettings(plan.optimizer_copies, plan.recompute)
    costs = [_costs(stage, schedule, memory, machines.overhead_s / 2) for stage in plan.stages]
    # A step is also a batch of 2bw.
    batch = batch_of_two_buffers(layout, microbatches) if schedule is Schedule.TWO_BUFFERED else 1
    fill, window = (0, microbatches) if schedule.synchronous else _steady_window(layout, depths, batch)
    drain = 0 if schedule.synchronous else fill
    ops = operations(schedule, layout, fill + window + drain, dict(enumerate(depths)), batch)
    result = simulate(
        layout,
        ops,
        costs,
        lambda sender, receiver: SimulatedLink(_rate(machines, sender, receiver), machines.latency_s),
        lambda worker: machines.device(worker).speed,
    )
    start = 0.0 if schedule.synchronous else result.finished_s(fill)
    end = result.end_s if schedule.synchronous else result.finished_s(fill + window)
    peak = max(result.peak_bytes.values())
    return Prediction((end - start) * microbatches / window, result.idle_share(start, end), peak, result)


def _steady_window(layout: Layout, depths: tuple[int, ...], batch: int) -> tuple[int, int]:
    """Microbatches that fill the pipeline, and as many more as are needed to measure its throughput.

    The throughput is periodic in the replicas of all stages and in the batch; if that period is too long, a
    long interval is used instead.
    """
    if batch > 1:
        return math.ceil(2 * layout.devices_from(0) / batch) * batch, batch
    deepest = [depth * len(workers) for depth, workers in zip(depths, layout.stages)]
    devices = max([layout.devices_from(0), *deepest])
    turn = math.lcm(*(len(workers) for workers in layout.stages))
    if turn > 4 * devices:
        return 2 * devices, 4 * devices
    return math.ceil(2 * devices / turn) * turn, math.ceil(devices / turn) * turn


def _costs(stage: Stage, schedule: Schedule, memory: MemorySettings, overhead_s: float) -> StageCosts:
    return StageCosts(
        forward_s=stage.forward_s + overhead_s,
        backward_s=stage.backward_s + overhead_s,
        output_bytes=stage.output_bytes,
        update_s=stage.update_s,
        parameter_bytes=memory_parts(stage).weights,
        state_bytes=memory_parts(stage).state(schedule, memory) + stage.summed_bytes,
        microbatch_bytes=memory_parts(stage).microbatch(memory),
    )


def _rate(machines: Cluster, sender: int, receiver: int) -> float:
    """The bandwidth of the outermost level that a message between two devices has to cross."""
    rate, unit = machines.levels[0].bytes_per_s, 1
    for level in machines.levels:
        if sender // unit != receiver // unit:
            rate = level.bytes_per_s
        unit *= level.count
    return rate


def single_s(graph: Graph, machines: Cluster) -> float:
    """Seconds per microbatch on only the fastest device."""
    return graph.compute_s() / max(machines.device(i).speed for i in range(machines.count))


def data_parallel_s(graph: Graph, machines: Cluster) -> float:
    """Seconds per microbatch if every device holds the whole model, with the planner's cost model."""
    seconds = graph.compute_s() / min(machines.device(i).speed for i in range(machines.count))
    below = 1
    for level in machines.levels:
        sync = level.sync_s(graph.parameter_bytes()) * (1 - 1 / level.count) / below
        seconds = (seconds + sync) / level.count
        below = level.count
    return seconds


def model_parallel_s(stages: Sequence[Stage], machines: Cluster) -> float:
    """Seconds per microbatch if only one stage works at a time."""
    seconds = 0.0
    for stage, behind in zip(stages, [*stages[1:], None]):
        seconds += stage.compute_s / machines.device(stage.devices[0]).speed
        if behind is not None:
            link = SimulatedLink(_rate(machines, stage.devices[0], behind.devices[0]), machines.latency_s)
            seconds += 2 * link.seconds(stage.output_bytes)
    return seconds


def depths_that_hide_messages(
    stages: Sequence[Stage], machines: Cluster, layout: Layout, bottleneck_s: float
) -> tuple[int, ...]:
    """Microbatches in flight in each stage when messages take time.

    The schedule's depth keeps all devices busy if messages take no time. From stage s a microbatch also
    travels to the last stage and back; meanwhile a replica could process one more for every `bottleneck_s`
    times its stage's replicas.
    """
    depths: list[int] = []
    travel = 0.0
    for s in range(len(stages) - 1, -1, -1):
        if s + 1 < len(stages):
            rate = _rate(machines, layout.stages[s][0], layout.stages[s + 1][0])
            travel += 2 * SimulatedLink(rate, machines.latency_s).seconds(stages[s].output_bytes)
        usual = math.ceil(layout.devices_from(s) / layout.replicas(s))
        wanted = usual + math.ceil(travel / (bottleneck_s * stages[s].replicas))
        if depths:
            wanted = max(wanted, least_depth(layout, s, depths[-1], updates=True))
        depths.append(wanted)
    return tuple(reversed(depths))


def choose_microbatches(plan: Plan) -> int:
    """The fewest microbatches per step of a plan that fit and are within 5% of the best time per microbatch.

    With few microbatches a synchronous pipeline idles while it fills and drains; many make the batch large.
    Asynchronous pipelines stay full with any number. Under stash an update uses one microbatch per replica of
    its stage: with as many as the smallest number of replicas, an update there is a batch. Under 2bw, whose
    update uses many, the number of devices is enough.
    """
    replicas = [len(workers) for workers in plan.layout().stages]
    depth, pipelines = sum(replicas), plan.pipelines
    if plan.schedule is Schedule.STASH:
        return pipelines * min(replicas)
    if not plan.schedule.synchronous:
        return pipelines * depth
    seconds: dict[int, float] = {}
    for count in sorted({max(replicas), depth, 2 * depth, 4 * depth, 8 * depth}):
        prediction = predict(replace(plan, microbatches=count * pipelines))
        if prediction.peak_bytes <= plan.machines.smallest_memory_bytes or not seconds:
            seconds[count] = prediction.step_s / count
    best = min(seconds.values())
    return pipelines * min(count for count, each in seconds.items() if each <= 1.05 * best)
