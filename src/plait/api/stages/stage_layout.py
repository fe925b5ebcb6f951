"""Where the stages of a model run: from a plan, a number of stages, the names of cuts, or measured now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from plait.api.world import World
from plait.comm.collectives import broadcast_value
from plait.core.codec import decode, encode
from plait.core.errors import InputError
from plait.core.shown import shown
from plait.pipeline.cutting.whole_modules import Stages
from plait.pipeline.layout import PipelineLayout, arrange, check_depths
from plait.pipeline.verify.verify_stages import stages_from_cuts
from plait.planner import (
    Plan,
    Schedule,
    Settings,
    data_parallel_plan,
    fastest_plan,
    machines,
    make_plan,
    measured_machines,
)
from plait.profiler.link_bandwidth import measure_links
from plait.profiler.profile import Profile
from plait.profiler.traced_model import TracedModel
from plait.schema.plans.plan import Layout

PlanLike = Plan | Sequence[str] | int | str
_EXPECTED = (
    "expected a plan (plait.plan makes one), a number of stages, the names of the first layers or modules of "
    "all stages but the first, such as ['blocks.2', 'blocks.4'], or 'auto'"
)
# Microbatches per worker in a step of a synchronous schedule.
_PER_WORKER = 4


def check_plan(plan: object) -> None:
    """Refuse what is no plan, also where nothing is cut."""
    is_count = isinstance(plan, int) and not isinstance(plan, bool) and plan >= 1
    are_names = isinstance(plan, Sequence) and not isinstance(plan, str)
    are_names = are_names and all(isinstance(each, str) for each in cast("Sequence[object]", plan))
    if not (isinstance(plan, Plan) or plan == "auto" or is_count or are_names):
        raise InputError(f"plan: found {shown(plan)}, {_EXPECTED}")


def check_names(plan: PlanLike, model: nn.Module, trace_model: Callable[[], TracedModel]) -> None:
    """Refuse names that the model does not have, also where nothing is cut.

    The model is traced only if they are not all names of its modules.
    """
    if not isinstance(plan, (Plan, int, str)) and not set(plan) <= {
        name for name, _ in model.named_modules()
    }:
        _cut_at(plan, trace_model)


def _cut_at(names: Sequence[str], trace_model: Callable[[], TracedModel]) -> Stages:
    try:
        return stages_from_cuts(trace_model(), names)
    except InputError as failure:
        raise InputError(f"plan: found {shown(names)}: {failure}; {_EXPECTED}") from None


def find_layout(
    plan: PlanLike,
    world: World,
    schedule: str | None,
    microbatches: int | None,
    samples: int,
    trace_model: Callable[[], TracedModel],
    profile_model: Callable[[], Profile],
) -> PipelineLayout:
    """The layout that `plan` describes, on the workers of `world`, which call it together.

    By default a batch of `samples` has no more microbatches than samples.
    """
    wanted = None if schedule is None else find_schedule(schedule)
    if isinstance(plan, Plan):
        # Workers that have measured the model themselves have planned it otherwise.
        first = decode(Plan, _of_first(world, lambda: encode(plan)))
        layout = _of_plan(first, world.world_size, wanted)
    elif plan == "auto":
        layout = _measured(world, wanted or Schedule.FLUSH, microbatches, profile_model)
    elif isinstance(plan, int):
        stages = _balanced(plan, world, profile_model)
        layout = _spread(stages, world.world_size, wanted or Schedule.FLUSH)
    else:
        layout = _spread(_cut_at(plan, trace_model), world.world_size, wanted or Schedule.FLUSH)
    layout = with_microbatches(layout, microbatches, samples)
    check_depths(layout)
    return layout


def find_schedule(name: str) -> Schedule:
    """The schedule of that name."""
    names = [schedule.value for schedule in Schedule]
    if name not in names:
        raise InputError(f"schedule: found {shown(name)}, expected one of {', '.join(names)}")
    return Schedule(name)


def _of_plan(plan: Plan, workers: int, schedule: Schedule | None) -> PipelineLayout:
    if plan.devices_used != workers:
        raise InputError(
            f"plan: it is for {plan.devices_used} devices, but there are {workers} workers; start "
            f"{plan.devices_used}, or plan for {workers}: plait.plan(profile, plait.machines({workers}, 1e9))"
        )
    layout = arrange(plan)
    return layout if schedule in (None, plan.schedule) else replace(layout, schedule=schedule, depths={})


def _spread(stages: Sequence[Sequence[str]], workers: int, schedule: Schedule) -> PipelineLayout:
    """Stages on workers: equal numbers of replicas of each, or equal numbers of stages for each worker."""
    count = len(stages)
    if workers % count == 0:
        replicas = workers // count
        placed = tuple(tuple(range(s * replicas, (s + 1) * replicas)) for s in range(count))
    elif count % workers == 0:
        placed = tuple((s % workers,) for s in range(count))
    else:
        raise InputError(
            f"plan: found {count} stages for {workers} workers, expected a divisor or a multiple of {workers}"
            f"; plan='auto' gives stages unlike numbers of replicas where that is faster"
        )
    return PipelineLayout(tuple(tuple(ids) for ids in stages), (Layout(placed),), schedule, 0)


def _balanced(count: int, world: World, profile_model: Callable[[], Profile]) -> Stages:
    """Stages that take about the same time, as rank 0 has measured the layers."""

    def cut() -> list[list[str]]:
        profile = profile_model()
        layers = len(profile.graph.nodes)
        if not 1 <= count <= layers:
            raise InputError(f"plan: found {count} stages, expected 1 to {layers}, the layers of the model")
        # Cut where stages are equal, whatever passes between them.
        plan = make_plan(profile, machines(count, 1e15), Settings(straight=True))
        seconds = {node.id: node.forward_s + node.backward_s for node in profile.graph.nodes}
        return _split_further([list(stage.layers) for stage in plan.stages], seconds, count)

    return tuple(tuple(ids) for ids in _of_first(world, cut))


def _split_further(stages: list[list[str]], seconds: Mapping[str, float], count: int) -> list[list[str]]:
    """Divide the slowest stages until there are `count`; further cuts may make no plan faster."""
    while len(stages) < count:
        slowest = max((ids for ids in stages if len(ids) > 1), key=lambda ids: sum(seconds[i] for i in ids))
        half = sum(seconds[id] for id in slowest) / 2
        cuts = range(1, len(slowest))
        at = min(cuts, key=lambda cut: abs(sum(seconds[id] for id in slowest[:cut]) - half))
        place = stages.index(slowest)
        stages[place : place + 1] = [slowest[:at], slowest[at:]]
    return stages


def _measured(
    world: World, schedule: Schedule, microbatches: int | None, profile_model: Callable[[], Profile]
) -> PipelineLayout:
    """The fastest plan that uses all workers, for layers and links as measured now."""
    workers, hosts = world.world_size, world.hosts
    # Workers of one host are alike.
    ranks = [rank for rank, host in enumerate(hosts) if hosts[:rank].count(host) < 2]
    links = measure_links(world.rendezvous, ranks, device=world.device)

    def plan() -> Any:
        graph = profile_model().loaded_graph()
        slots = [hosts.count(host) for host in dict.fromkeys(hosts)]
        two_levels = len(slots) > 1 and len(set(slots)) == 1 and slots[0] > 1
        counts = (slots[0], len(slots)) if two_levels else (workers,)
        cluster = measured_machines(counts, links, ())
        asked = Settings(schedule, microbatches or _PER_WORKER * workers)
        best = fastest_plan(graph, cluster, asked)
        # Every worker must have a stage.
        whole = best.devices_used == workers
        return encode(best if whole else data_parallel_plan(graph, cluster, asked))

    layout = _of_plan(decode(Plan, _of_first(world, plan)), workers, None)
    return replace(layout, microbatches=0)


def _of_first(world: World, make: Callable[[], Any]) -> Any:
    """What `make` returns on rank 0, on all workers; it must be plain JSON."""
    outcome: dict[str, Any] = {}
    if world.is_first:
        try:
            outcome["value"] = make()
        except InputError as failure:
            outcome["failure"] = str(failure)
    outcome = broadcast_value(outcome, 0)
    if "failure" in outcome:
        raise InputError(outcome["failure"])
    return outcome["value"]


def with_microbatches(layout: PipelineLayout, microbatches: int | None, samples: int) -> PipelineLayout:
    """The layout with `microbatches`, or with a number that suits it.

    Under an asynchronous schedule each step ends with an update of every stage, so that the next step can
    follow while microbatches are in flight. Under stash the smallest number is the default: an update then
    takes a whole batch, as in a plain loop.
    """
    usual = 1 if layout.schedule is Schedule.STASH else min(samples, _PER_WORKER * len(layout.workers))
    wanted = microbatches or layout.microbatches or usual
    layout = replace(layout, microbatches=wanted)
    if layout.schedule.synchronous:
        return layout
    unit = layout.pipelines * (
        math.lcm(*(layout.layout.replicas(stage) for stage in range(len(layout.stages))))
        if layout.schedule is Schedule.STASH
        else layout.batch_of_two_buffers
    )
    rounded = math.ceil(wanted / unit) * unit
    if microbatches is not None and microbatches != rounded:
        raise InputError(
            f"microbatches: found {microbatches}, but under schedule {layout.schedule.value} these stages "
            f"update after {unit}; expected a multiple of {unit}, or a schedule that drains, such as flush"
        )
    return replace(layout, microbatches=rounded)
