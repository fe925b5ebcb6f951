"""Whether a job can train under its plan, and the layout that this gives."""

from __future__ import annotations

from plait.core.errors import JobError, PlanError
from plait.pipeline.layout import PipelineLayout, arrange, check_compiled, check_depths, with_choices
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import TrainSettings
from plait.training.engines.replica_layout import check_replicas


def check_pipeline(settings: TrainSettings, workers: int | None) -> PipelineLayout:
    """The layout of a job's plan on `workers` workers (None: the number in the plan).

    JobError for settings that a pipeline does not support.
    """
    pipeline_layout = check_plan(settings, workers)
    if settings.sync.kind != "all-reduce":
        check_replicas(settings, pipeline_layout)
    return pipeline_layout


def check_plan(settings: TrainSettings, workers: int | None) -> PipelineLayout:
    """As `check_pipeline`, for workers who may hold the plan's pipelines several times under their sync."""
    assert settings.pipeline is not None
    plan = settings.pipeline.plan
    workers = plan.devices_used if workers is None else workers
    if plan.devices_used != workers:
        raise JobError(
            f"parallel.plan: the plan is for {plan.devices_used} devices, but the job has {workers} "
            f"worker{'s' if workers > 1 else ''}; "
            f"use -np {plan.devices_used}, or plan for {workers}"
        )
    if settings.precision == "fp16" and not (
        plan.schedule.synchronous and settings.sync.kind == "all-reduce"
    ):
        what = (
            f"sync {settings.sync.kind}" if plan.schedule.synchronous else f"schedule {plan.schedule.value}"
        )
        raise JobError(
            f"precision: found 'fp16', whose loss scale all stages must agree on, with {what}, under which "
            f"each updates separately; use bf16 or float32, or sync all-reduce and schedule flush, gpipe or "
            f"zero-bubble"
        )
    if settings.compile:
        check_compiled(plan.schedule)
    if settings.accumulate > 1:
        raise JobError("accumulate: a pipeline accumulates by itself; use parallel.microbatches instead")
    wrong = [stage for stage in settings.pipeline.recompute if not 0 <= stage < len(plan.stages)]
    if wrong:
        raise JobError(
            f"parallel.recompute: found stage {wrong[0]}, expected stages 0 to {len(plan.stages) - 1} of the "
            f"plan"
        )
    if settings.pipeline.vertical_sync and plan.schedule is not Schedule.STASH:
        raise JobError(
            f"parallel.vertical_sync: found schedule {plan.schedule.value}, which has one version by itself; "
            f"expected stash"
        )
    pipeline_layout = with_choices(arrange(plan), settings.pipeline)
    try:
        check_depths(pipeline_layout)
    except PlanError as failure:
        raise JobError(f"parallel.depths: {failure}") from None
    return pipeline_layout
