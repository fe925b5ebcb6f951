"""Choosing the plan of a run: read from its file, or made by measuring the job first."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.codec import decode
from plait.core.errors import ArtefactError, JobError
from plait.measure.plan_warnings import describe_clipping, describe_memory, describe_updates, other_microbatch
from plait.pipeline.layout import arrange
from plait.planner import (
    Cluster,
    MemorySettings,
    Plan,
    PlanError,
    Schedule,
    Settings,
    data_parallel_plan,
    faster_plan,
    fastest_plan,
    load_plan,
    machines,
    measured_machines,
    model_parallel_plan,
    with_runtime_memory,
)
from plait.planner.replan import plan_for
from plait.schema.hosts import LOCAL, Host
from plait.schema.job_checks import check_slow
from plait.schema.job_settings import Job
from plait.schema.placement import ElasticRules, Placement
from plait.schema.plans.graph import Graph
from plait.schema.settings import (
    OptimizerSettings,
    PipelineOptions,
    PipelineSettings,
    PlanRequest,
    TrainSettings,
    values_of,
)
from plait.training.engines.replica_layout import workers_of_replica

if TYPE_CHECKING:
    from plait.profiler.profile import Profile

# The default number of microbatches per worker and step.
_PER_WORKER = 4
# What enters a pipeline at once is a whole batch: under stash an update takes that, and under none
# nothing follows it before it is back.
_WHOLE_BATCHES = (Schedule.STASH, Schedule.NONE)
log = logging.getLogger(__name__)
# Layers are measured for at least this long: the speed of a machine varies from second to second.
MEASURE_S = 3.0


def plan_job(
    job: Job, settings: TrainSettings, placement: Placement, before: TrainSettings | None = None
) -> tuple[TrainSettings, Placement, Plan, list[str]]:
    """The job's settings with its plan, the workers that run it, the plan, and what to warn the user of.

    Without hosts and a number of workers in the job, the plan says how many there are. `before` are the
    settings of the run that is resumed, if any.
    """
    parallel = job.parallel
    settings, plan = planned(settings, placement, parallel, before, MEASURE_S)
    if parallel.workers is None and not job.hosts:
        placement = replace(placement, hosts=(Host(LOCAL, plan.devices_used),))
    warnings = []
    if parallel.needs_planning and plan.devices_used < placement.workers:
        used, workers = plan.devices_used, placement.workers
        warnings.append(f"{used} of {workers} workers run it: the plan has no use for the others")
        plan, placement = on_fewer_workers(plan, placement)
        settings = settings.with_stages(plan=plan)
    check_slow(settings.slow.factors, placement.workers)
    if _is_data_parallel(plan, parallel) and not may_plan_again(settings, placement):
        settings = settings.with_stages(as_data_parallel=True)
    warnings += [describe_updates(plan, settings), describe_clipping(plan, settings), describe_memory(plan)]
    if not parallel.needs_planning:
        warnings.append(other_microbatch(plan, settings))
    return settings, placement, plan, list(filter(None, warnings))


def _is_data_parallel(plan: Plan, request: PlanRequest) -> bool:
    """Whether replicas of the whole model, each with its share of a batch, were found to be the best."""
    whole = len(plan.stages) == 1 and plan.pipelines == 1 and plan.microbatches == plan.devices_used
    return request.leaves_microbatches_open and whole and plan.schedule.synchronous


def planned(
    settings: TrainSettings,
    placement: Placement,
    request: PlanRequest,
    before: TrainSettings | None = None,
    measure_s: float = MEASURE_S,
) -> tuple[TrainSettings, Plan]:
    """`settings` with the plan that `request` asks for, and the plan; measures the job where it must.

    A run that goes on, whose settings were `before`, keeps its plan: another measurement might give another,
    and with it other updates.
    """
    graph = before.stages.graph if before is not None and before.in_stages else None
    if not request.needs_planning:
        plan = _read(Path(request.plan), settings, request)
    elif (kept := _kept(settings, placement, request, before)) is not None:
        plan = kept
    else:
        plan, measured = measure_and_plan(settings, placement, request, measure_s)
        graph = measured
    plan = with_runtime_memory(plan, request)
    if not may_plan_again(settings, placement):
        graph = None
    elif graph is None:
        graph = _measured_graph(settings, placement, plan, measure_s)
    if placement.elastic is not None and graph is not None:
        _check_sizes(plan, graph, placement.elastic)
    elif placement.elastic is not None:
        _check_least(plan, placement.elastic)
    chosen = PipelineSettings(plan, graph, **values_of(PipelineOptions, request))
    return replace(settings, pipeline=chosen), plan


def may_plan_again(settings: TrainSettings, placement: Placement) -> bool:
    """Whether the plan may change while the job runs: in an elastic job, or by a policy.

    Pipelines side by side come and go as a whole: their stages stay.
    """
    is_elastic = placement.elastic is not None and settings.sync.kind == "all-reduce"
    return is_elastic or any(each.kind == "plan" for each in settings.adapt)


def _check_sizes(plan: Plan, graph: Graph, rules: ElasticRules) -> None:
    """Refuse a range of workers for which some number has no plan."""
    for workers in range(rules.min_workers, rules.max_allowed + 1):
        try:
            plan_for(plan, graph, [1.0] * workers)
        except PlanError as failure:
            raise JobError(
                f"parallel.elastic: the job may have {workers} workers (parallel.min_workers "
                f"{rules.min_workers}, parallel.max_workers {rules.max_allowed}), but {failure}"
            ) from None


def _check_least(plan: Plan, rules: ElasticRules) -> None:
    """Refuse a number of workers with which there would be no pipeline."""
    needed = workers_of_replica(arrange(plan))
    if rules.min_workers < needed:
        raise JobError(
            f"parallel.min_workers: found {rules.min_workers}, but each pipeline of the plan has {needed} "
            f"workers; expected {needed} or more"
        )


def _measured_graph(settings: TrainSettings, placement: Placement, plan: Plan, measure_s: float) -> Graph:
    """The costed graph of a job whose plan has none."""
    from plait.measure.profile_job import ProfileRequest, profile_together  # imports torch

    size = max(1, round(settings.data.batch_size / plan.microbatches))
    (profile,) = profile_together(ProfileRequest(settings, (size,), least_s=measure_s), placement)
    return profile.loaded_graph()


def settings_before(path: Path) -> TrainSettings | None:
    """The settings of the run to resume; None if its file cannot be read."""
    try:
        return decode(TrainSettings, json.loads(path.read_text()), str(path))
    except (OSError, ValueError, ArtefactError):
        return None


def _kept(
    settings: TrainSettings, placement: Placement, request: PlanRequest, before: TrainSettings | None
) -> Plan | None:
    """The plan of the resumed run, if the job and its number of workers have not changed."""
    if before is None or not before.in_stages:
        return None
    plan = before.stages.plan
    same = (
        plan.machines.count == placement.workers
        and before.data.batch_size == settings.data.batch_size
        and request.schedule in (None, plan.schedule)
        and request.microbatches in (None, plan.microbatches)
    )
    log.info("the run %s", "continues under its plan" if same else "is planned again: the job has changed")
    return plan if same else None


def on_fewer_workers(plan: Plan, placement: Placement) -> tuple[Plan, Placement]:
    """The plan and its placement, without workers that it leaves idle."""
    used = sorted({device for stage in plan.stages for device in stage.devices})
    number = {device: rank for rank, device in enumerate(used)}
    hosts, first = [], 0
    for host in placement.hosts:
        kept = sum(first <= device < first + host.slots for device in used)
        first += host.slots
        if kept:
            hosts.append(replace(host, slots=kept))
    stages = tuple(replace(s, devices=tuple(number[device] for device in s.devices)) for s in plan.stages)
    return replace(plan, stages=stages), replace(placement, hosts=tuple(hosts))


def with_whole_batches(plan: Plan) -> Plan:
    """The plan with as many microbatches as make an update of stash take one batch, where that can be.

    A stage with R replicas updates after R microbatches, so the stage with the fewest takes a batch and the
    others more: never less than what the learning rate was chosen for. Other schedules need one a replica.
    """
    counts = [len(stage.devices) for stage in plan.stages]
    return replace(plan, microbatches=min(counts) if plan.schedule is Schedule.STASH else max(counts))


def _read(path: Path, settings: TrainSettings, request: PlanRequest) -> Plan:
    plan = load_plan(path)
    if request.schedule is not None and request.schedule != plan.schedule:
        plan = replace(plan, schedule=Schedule(request.schedule), depths=())
        if plan.schedule in _WHOLE_BATCHES:
            # How the plan's own schedule cuts a batch says nothing of updates of one that never drains.
            plan = with_whole_batches(plan)
    plan = replace(plan, microbatches=request.microbatches or plan.microbatches)
    if plan.microbatches > settings.data.batch_size:
        raise JobError(
            f"data.batch_size: found {settings.data.batch_size}, but the plan cuts a batch into "
            f"{plan.microbatches} microbatches; use a larger batch or fewer parallel.microbatches"
        )
    return plan


def measure_and_plan(
    settings: TrainSettings, placement: Placement, request: PlanRequest, measure_s: float
) -> tuple[Plan, Graph]:
    """Profile the job on its workers, layers for at least `measure_s`, and plan it as `request` says.

    Returns the plan, and what the layers were measured to cost for it.
    """
    from plait.measure.profile_job import ProfileRequest, profile_together  # imports torch

    workers, batch = placement.workers, settings.data.batch_size
    schedule = _schedule(request)
    usual = 1 if schedule in _WHOLE_BATCHES or workers == 1 else min(batch, _PER_WORKER * workers)
    microbatches = request.microbatches or usual
    small, whole = max(1, round(batch / microbatches)), math.ceil(batch / workers)
    is_open = request.leaves_microbatches_open and settings.sync.kind == "all-reduce" and batch >= workers
    sizes = tuple(sorted({small, whole} if is_open else {small}))
    tries_data_parallel = is_open and workers > 1
    asked_for = ProfileRequest(settings, sizes, least_s=measure_s, data_parallel=tries_data_parallel)
    profiles = dict(zip(sizes, profile_together(asked_for, placement)))
    if message := profiles[small].doubts():
        log.warning("parallel.plan: %s", message)
    cluster = _machines(placement, profiles[small])
    memory = MemorySettings(_optimizer_copies(settings.optimizer))
    asked = Settings(schedule, microbatches, memory=memory)
    graph = profiles[small].loaded_graph()
    if request.plan == "model-parallel":
        plan = model_parallel_plan(graph, cluster, asked)
        return replace(plan, schedule=schedule, microbatch_samples=small), graph
    if settings.sync.kind != "all-reduce":
        plan = _side_by_side(graph, cluster, asked, settings.sync.kind)
        return replace(plan, microbatch_samples=small), graph
    best = replace(fastest_plan(graph, cluster, asked), microbatch_samples=small)
    if schedule is Schedule.STASH and request.microbatches is None:
        best = with_whole_batches(best)
        best = replace(best, microbatches=min(best.microbatches, batch))
    if is_open:
        one_each = Settings(Schedule.FLUSH, workers, memory=memory)
        large = profiles[whole].loaded_graph()
        shared = replace(data_parallel_plan(large, cluster, one_each), microbatch_samples=whole)
        best = faster_plan(best, shared, profiles[whole].data_parallel_s)
        graph = large if best.microbatch_samples == whole else graph
    return best, graph


def _side_by_side(graph: Graph, cluster: Cluster, asked: Settings, kind: str) -> Plan:
    """The fastest plan of pipelines side by side, which agree by averaging: equal workers in every stage."""
    plans = []
    for pipelines in range(2, cluster.count + 1):
        if cluster.count % pipelines == 0:
            with contextlib.suppress(PlanError):
                microbatches = max(asked.microbatches or 1, pipelines)
                each = replace(asked, pipelines=pipelines, straight=True, microbatches=microbatches)
                plans.append(fastest_plan(graph, cluster, each))
    if not plans:
        raise JobError(
            f"parallel.plan: found auto with sync {kind}, which needs pipelines side by side with as many "
            f"workers in every stage, and {cluster.count} workers make none; use plan: data-parallel, or "
            f"sync: all-reduce"
        )
    return min(plans, key=lambda plan: plan.step_s / plan.microbatches)


def _schedule(request: PlanRequest) -> Schedule:
    """The schedule of a pipeline: the job's, else one that updates as one process does.

    Only stash has versions of the weights that could be the same in all stages.
    """
    if request.schedule is not None:
        return Schedule(request.schedule)
    if request.plan == "model-parallel":
        return Schedule.NONE
    return Schedule.STASH if request.vertical_sync else Schedule.FLUSH


def _machines(placement: Placement, profile: Profile) -> Cluster:
    """Hosts with as many workers each are two levels; others are one, as fast as its slowest link."""
    slots = [host.slots for host in placement.hosts]
    if not profile.links:
        return machines(sum(slots), 1e9)
    two_levels = len(slots) > 1 and len(set(slots)) == 1 and slots[0] > 1
    counts = (slots[0], len(slots)) if two_levels else (sum(slots),)
    return measured_machines(counts, profile.links, profile.sums, overhead_s=profile.overhead_s)


def _optimizer_copies(optimizer: OptimizerSettings) -> float:
    """How many state values the optimizer keeps per weight."""
    if optimizer.kind == "sgd":
        return 1.0 if optimizer.options.get("momentum") else 0.0
    return 2.0
