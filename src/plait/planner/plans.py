"""Complete plans: the planner's, and data and model parallelism for comparison."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from plait.core.errors import PlanError
from plait.core.shown import shown
from plait.graph.ideals import Ideals, trivial_ideals
from plait.planner.explain import (
    Replays,
    reasons,
    why_faster,
    why_longer,
    why_not_best_cut,
    why_not_run,
)
from plait.planner.partition.fits import check_memory, check_work, misfit
from plait.planner.partition.heterogeneous import Placed
from plait.planner.partition.partitioner import (
    Partition,
    Settings,
    check,
    make_partition,
    planning_graph,
    straight_partition,
    with_step_costs,
)
from plait.planner.partition.ties import find_tied, update_together
from plait.planner.predict import (
    choose_microbatches,
    data_parallel_s,
    depths_that_hide_messages,
    model_parallel_s,
    predict,
    single_s,
)
from plait.planner.schedules.in_flight import Schedule, in_flight
from plait.planner.schedules.operations import Backward, BackwardWeight, Forward, Op
from plait.planner.schedules.orders import operations
from plait.planner.stage_memory import MemorySettings, kept_bytes, stage_bytes, working_bytes
from plait.schema.plans.cluster import Cluster
from plait.schema.plans.graph import Graph
from plait.schema.plans.plan import Layout, Plan, Speedups, Stage, Tied


class HasGraph(Protocol):
    """A profile: its graph includes the loading time of the first stage."""

    def loaded_graph(self) -> Graph: ...


def make_plan(graph: Graph | HasGraph, machines: Cluster, settings: Settings | None = None) -> Plan:
    """The best plan for `graph` or a profile on `machines`, with predicted costs and the reasons.

    `settings` (`plait.planner.Settings`) are the schedule (`stash` by default), the number of microbatches
    and of pipelines, and limits on replicas and memory.

    Examples:
        ```python
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        profile = plait.profile(model, torch.randn(8, 64), repeats=2)
        plan = plait.plan(profile, plait.machines(2, 1e9))
        plan.step_s
        ```
    """
    graph = _graph_of(graph, machines)
    settings = _with_microbatches(settings or Settings(), machines)
    graph = planning_graph(graph)
    partition = make_partition(graph, machines, settings)
    if settings.schedule is Schedule.INTERLEAVED:
        partition = _interleaved(partition, machines)
    return _finish(graph, machines, settings, partition)


def _graph_of(graph: Graph | HasGraph, machines: Cluster) -> Graph:
    """The graph to plan, given as a graph or a profile; raises for other arguments of the Python API."""
    if not isinstance(machines, Cluster):
        raise PlanError(f"plan: found {shown(machines)} as machines, expected plait.machines(4, 1e9)")
    if isinstance(graph, Graph):
        return graph
    if hasattr(graph, "loaded_graph"):
        return graph.loaded_graph()
    raise PlanError(
        f"plan: found {shown(graph)}, expected a profile or its graph, as plait.profile(model, inputs) makes"
    )


def fastest_plan(graph: Graph | HasGraph, machines: Cluster, settings: Settings | None = None) -> Plan:
    """The plan with the shortest simulated step: the best cut, one replica per stage, or one stage for all.

    The best cut has the lowest bottleneck, which does not include filling and draining of pipelines, nor
    waiting of replicas for each other; and stash cannot run it if stages with different numbers of replicas
    share weights.
    """
    started = time.process_time()
    graph = _graph_of(graph, machines)
    settings = settings or Settings()
    best = make_plan(graph, machines, settings)
    chosen = _fastest(graph, machines, settings, best)
    if chosen is not best:
        cut = best.best_partition
        # The bound is that of the problem, whichever plan was chosen.
        is_best = best.exact and chosen.bottleneck_s <= best.bottleneck_s * (1 + 1e-9)
        chosen = replace(chosen, lower_bound_s=best.lower_bound_s, exact=is_best, other_cut=cut)
    longer = why_longer(best, _replays(best), is_chosen=chosen is best)
    return replace(chosen, solve_s=time.process_time() - started, why=f"{chosen.why} {longer}".strip())


def _replays(plan: Plan) -> Replays:
    """The simulated step of `plan` without each of the things that may make it long."""
    depths = plan.depths
    if plan.schedule in (Schedule.STASH, Schedule.FLUSH) and len(plan.stages) > 1 and not depths:
        depths = depths_that_hide_messages(plan.stages, plan.machines, plan.layout(), plan.bottleneck_s)
    hidden = replace(plan, depths=depths)
    without_updates = tuple(replace(stage, update_s=0.0) for stage in plan.stages)
    return Replays(predict(hidden).step_s, predict(replace(hidden, stages=without_updates)).step_s)


def _fastest(graph: Graph, machines: Cluster, settings: Settings, best: Plan) -> Plan:
    """`best`, or a simple plan whose simulated step is shorter."""
    if settings.straight or settings.pipelines > 1 or settings.schedule is Schedule.INTERLEAVED:
        return best
    others = []
    for make, asked in ((data_parallel_plan, settings), (make_plan, replace(settings, straight=True))):
        # Skip plans that do not fit.
        with contextlib.suppress(PlanError):
            others.append(make(graph, machines, asked))
    if not others:
        return best
    runs = settings.schedule is not Schedule.STASH or update_together(graph.ties, best.stages)
    simple = min(others, key=_replayed_s)
    if runs and _replayed_s(simple) > 0.99 * _replayed_s(best):
        return best
    why = why_not_best_cut(best, simple) if runs else why_not_run(best)
    # One replica per stage was not requested; it is only the best result.
    why_chosen = reasons(simple, planning_graph(graph), _limits(machines, settings))
    return replace(simple, why=f"{why_chosen} {why}")


# The minimum predicted gain of a plan over a simpler one; less is measurement noise.
LEAST_GAIN = 1.1


def faster_plan(plan: Plan, simple: Plan, measured_s: float | None = None) -> Plan:
    """`simple`, unless `plan` is predicted to be at least a tenth faster; the reason mentions the other.

    Both must be for the same batch; the numbers of microbatches may differ. `measured_s` is the measured step
    of `simple`, if there is one; the prediction is used if it is shorter.
    """
    simple_s = simple.step_s if measured_s is None else min(simple.step_s, measured_s)
    is_faster = plan.step_s * LEAST_GAIN <= simple_s
    chosen, other = (plan, simple) if is_faster else (simple, plan)
    why = why_faster(chosen, other, plan.step_s < simple_s and not is_faster, measured_s)
    return replace(chosen, why=f"{chosen.why} {why}")


def _replayed_s(plan: Plan) -> float:
    return plan.step_s / plan.microbatches


def data_parallel_plan(graph: Graph, machines: Cluster, settings: Settings | None = None) -> Plan:
    """Every device holds the whole model, and only gradients are sent."""
    settings = replace(_with_microbatches(settings or Settings(), machines), pipelines=1)
    if settings.schedule is Schedule.INTERLEAVED:
        settings = replace(settings, schedule=Schedule.FLUSH)
    graph = planning_graph(graph)
    check(graph, machines, settings)
    ideals = trivial_ideals(graph)
    stages = (Placed(0, 1, tuple(range(machines.count))),)
    seconds = data_parallel_s(graph, machines)
    return _finish(graph, machines, settings, Partition(ideals, stages, seconds, 0.0, False, 0.0))


def model_parallel_plan(graph: Graph, machines: Cluster, settings: Settings | None = None) -> Plan:
    """One stage per device, no replicas, and one microbatch at a time."""
    settings = replace(settings or Settings(), schedule=Schedule.NONE, straight=True, pipelines=1)
    graph = planning_graph(graph)
    partition = make_partition(graph, machines, settings)
    stages = _build_stages(graph, machines, settings, partition, settings.microbatches or 1)
    seconds = model_parallel_s(stages, machines)
    plain = replace(partition, bottleneck_s=seconds, lower_bound_s=0.0, exact=False)
    return _finish(graph, machines, settings, plain)


def _with_microbatches(settings: Settings, machines: Cluster) -> Settings:
    """Set the microbatches of GPipe before planning, as its memory depends on their number."""
    if settings.schedule is Schedule.GPIPE and settings.microbatches is None:
        return replace(settings, microbatches=4 * machines.count)
    return settings


def _finish(graph: Graph, machines: Cluster, settings: Settings, partition: Partition) -> Plan:
    count = settings.microbatches
    stages = _build_stages(graph, machines, settings, partition, count or machines.count * 8)
    plan = _bare(stages, machines, settings, partition)
    if count is None:
        count = choose_microbatches(plan)
        stages = _build_stages(graph, machines, settings, partition, count)
    plan = replace(plan, stages=stages, microbatches=count)
    prediction = predict(plan)
    if settings.hide_messages and settings.schedule in (Schedule.STASH, Schedule.FLUSH):
        depths = depths_that_hide_messages(stages, machines, plan.layout(), partition.bottleneck_s)
        deeper = _build_stages(graph, machines, settings, partition, count, depths)
        other = replace(plan, stages=deeper, depths=depths)
        predicted = predict(other)
        if predicted.step_s < prediction.step_s and misfit(deeper, machines) is None:
            plan, prediction = other, predicted
    check_memory(plan.stages, machines)
    if settings.schedule.synchronous:
        check_work(plan.stages, count)
    plan = replace(plan, step_s=prediction.step_s, idle_share=prediction.idle_share)
    plan = replace(plan, speedup_over=_speedups(graph, machines, settings, partition))
    return replace(plan, why=reasons(plan, graph, _limits(machines, settings)))


def _limits(machines: Cluster, settings: Settings) -> list[str]:
    """Descriptions of the user's restrictions that may exclude a faster plan."""
    limits = ["the memory"] if math.isfinite(machines.smallest_memory_bytes) else []
    shaped = settings.schedule in (Schedule.INTERLEAVED, Schedule.NONE)
    if settings.straight or settings.pipelines > 1 or shaped:
        limits.append("the shape of plan")
    return limits


def _bare(stages: tuple[Stage, ...], machines: Cluster, settings: Settings, partition: Partition) -> Plan:
    """A plan without predictions."""
    return Plan(
        stages=stages,
        machines=machines,
        schedule=settings.schedule,
        microbatches=1,
        pipelines=settings.pipelines,
        bottleneck_s=partition.bottleneck_s,
        lower_bound_s=partition.lower_bound_s,
        solve_s=partition.solve_s,
        exact=partition.exact,
        step_s=0.0,
        idle_share=0.0,
        speedup_over=Speedups(1.0, 1.0, 1.0),
        optimizer_copies=settings.memory.optimizer_copies,
        recompute=settings.memory.recompute,
        why="",
    )


def _build_stages(
    graph: Graph,
    machines: Cluster,
    settings: Settings,
    partition: Partition,
    microbatches: int,
    depths: tuple[int, ...] = (),
) -> tuple[Stage, ...]:
    layout = Layout(tuple(placed.devices for placed in partition.stages))
    held = held_microbatches(settings.schedule, layout, microbatches, depths)
    layers = [partition.ideals.between(placed.start, placed.end) for placed in partition.stages]
    tied = find_tied(graph.ties, layers, layout, depths)
    return tuple(
        _build_stage(graph, machines, settings, partition.ideals, placed, held[s], tied[s])
        for s, placed in enumerate(partition.stages)
    )


def held_microbatches(
    schedule: Schedule, layout: Layout, microbatches: int, depths: tuple[int, ...] = ()
) -> list[int]:
    """The maximum number of microbatches in flight in each stage."""
    stages = range(len(layout.stages))
    if not schedule.synchronous:
        # The stream of microbatches does not end with the step.
        microbatches = max(microbatches, layout.devices_from(0), *_spans(layout, depths))
    if schedule is not Schedule.INTERLEAVED:
        given = dict(enumerate(depths))
        return [in_flight(schedule, layout, stage, microbatches, given) for stage in stages]
    ops = operations(schedule, layout, microbatches)
    return [_most_held(ops[layout.stages[stage][0]], stage) for stage in stages]


def _spans(layout: Layout, depths: tuple[int, ...]) -> list[int]:
    return [depth * len(workers) for depth, workers in zip(depths, layout.stages)]


def _most_held(ops: Sequence[Op], stage: int) -> int:
    held = most = 0
    for op in ops:
        if op.stage == stage:
            held += isinstance(op, Forward) - isinstance(op, (Backward, BackwardWeight))
            most = max(most, held)
    return most


def _build_stage(
    graph: Graph,
    machines: Cluster,
    settings: Settings,
    ideals: Ideals,
    placed: Placed,
    held: int,
    tied: Tied,
) -> Stage:
    layers = ideals.between(placed.start, placed.end)
    kept = kept_bytes(graph)
    nodes = [graph.node_by_id[layer] for layer in layers]
    forward = math.fsum(node.forward_s for node in nodes)
    backward = math.fsum(node.backward_s for node in nodes)
    if settings.memory.recompute:
        backward += forward
    parameters = math.fsum(node.parameter_bytes for node in nodes)
    agree = _agree_s(machines, placed.devices, parameters)
    write = math.fsum(node.update_s for node in nodes)
    if settings.schedule is Schedule.TWO_BUFFERED or (settings.schedule is Schedule.STASH and held > 1):
        write += math.fsum(node.version_s for node in nodes)
    each = write if settings.schedule is Schedule.STASH else 0.0
    slowest = min(machines.device(device).speed for device in placed.devices)
    stage = Stage(
        layers=layers,
        replicas=len(placed.devices),
        devices=placed.devices,
        forward_s=forward,
        backward_s=backward,
        cost_s=((forward + backward + each) / slowest + agree) / len(placed.devices),
        update_s=agree + write / slowest,
        parameter_bytes=parameters,
        buffer_bytes=math.fsum(node.buffer_bytes for node in nodes),
        activation_bytes=math.fsum(kept[layer] for layer in layers)
        - float(ideals.kept_behind_bytes[placed.start]),
        input_bytes=float(ideals.crossing_bytes[placed.start]),
        output_bytes=float(ideals.crossing_bytes[placed.end]),
        in_flight=held,
        memory_bytes=0.0,
        working_bytes=working_bytes(nodes, settings.schedule),
        tied=tied,
    )
    return replace(stage, memory_bytes=stage_bytes(stage, settings.schedule, settings.memory))


def _agree_s(machines: Cluster, devices: Sequence[int], parameter_bytes: float) -> float:
    """Seconds of the replicas' all-reduce, by level; after an inner level each has a share of the sum."""
    seconds, unit, shared = 0.0, 1, 1
    for level in machines.levels:
        units = len({device // unit for device in devices})
        unit *= level.count
        replicas = math.ceil(units / len({device // unit for device in devices}))
        seconds += level.sync_s(parameter_bytes) * (1 - 1 / replicas) / shared
        shared = replicas
    return seconds


def _interleaved(partition: Partition, machines: Cluster) -> Partition:
    """Assign the stages to the devices round-robin; costs of a device's stages are added."""
    stages = tuple(
        replace(placed, devices=(s % machines.count,)) for s, placed in enumerate(partition.stages)
    )
    seconds = [0.0] * machines.count
    for placed in stages:
        between = partition.ideals.compute_s[placed.end] - partition.ideals.compute_s[placed.start]
        seconds[placed.devices[0]] += float(between) / machines.device(placed.devices[0]).speed
    speeds = [machines.device(device).speed for device in range(machines.count)]
    floor = float(partition.ideals.compute_s[-1]) / sum(speeds)
    return replace(partition, stages=stages, bottleneck_s=max(seconds), lower_bound_s=floor, exact=False)


def _speedups(graph: Graph, machines: Cluster, settings: Settings, partition: Partition) -> Speedups:
    straight = straight_partition(partition.ideals, machines)
    stages = _build_stages(graph, machines, settings, replace(partition, stages=straight), 1)
    seconds = partition.bottleneck_s
    # Compare with plans that also update after every microbatch, but do not recompute.
    plain = with_step_costs(graph, replace(settings, memory=MemorySettings()))
    return Speedups(
        single=single_s(plain, machines) / seconds,
        data_parallel=data_parallel_s(plain, machines) / seconds,
        model_parallel=model_parallel_s(stages, machines) / seconds,
    )
