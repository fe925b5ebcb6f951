"""The stages of an array: which plans a sweep can run, and how the workers of a group hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plait.core.errors import InputError, JobError
from plait.pipeline.layout import PipelineLayout, arrange, with_choices
from plait.planner.schedules.in_flight import Schedule
from plait.schema.plans.plan import Layout
from plait.sweeping.settings import SweepSettings
from plait.training.checks.pipeline import check_pipeline


def layout_from(first: int, settings: SweepSettings) -> PipelineLayout:
    """The layout of a group whose first worker has rank `first`: each replica of the plan is a pipeline."""
    pipeline = settings.train.stages
    layout = with_choices(arrange(pipeline.plan), pipeline)
    starts = range(first, first + settings.workers_per_array, pipeline.plan.devices_used)
    return replace(layout, layouts=tuple(_moved(each, start) for start in starts for each in layout.layouts))


def _moved(layout: Layout, start: int) -> Layout:
    return Layout(tuple(tuple(start + worker for worker in workers) for workers in layout.stages))


def holders_of_stages(settings: SweepSettings) -> set[int]:
    """How many workers of a group hold a stage, of each."""
    layout = layout_from(0, settings)
    return {len(layout.holders(stage)) for stage in range(len(layout.stages))}


def check_stages_of(settings: SweepSettings) -> None:
    """Refuse a plan or settings that arrays in stages do not support."""
    if not settings.train.in_stages:
        return
    check_in_stages(settings)
    plan = settings.train.stages.plan
    check_schedule(plan.schedule)
    check_pipeline(settings.train, None)
    pipelines = settings.replicas * plan.pipelines
    if plan.microbatches < pipelines:
        raise InputError(
            f"--replicas: found {settings.replicas} for a plan that cuts a batch into {plan.microbatches} "
            f"microbatches, which {pipelines} pipelines share; use --set parallel.microbatches={pipelines} "
            f"or more, or fewer replicas"
        )


def check_in_stages(settings: SweepSettings) -> None:
    """Refuse settings that arrays in stages do not support, for any plan."""
    if (sync := settings.train.sync.kind) != "all-reduce":
        raise JobError(
            f"parallel.sync: found {sync!r} with a plan, but the workers of a stage sum the gradients of an "
            f"array; use all-reduce, or --replicas without a plan"
        )
    # What is no number is refused with the job's own words.
    counts = _values(settings, "accumulate", settings.train.accumulate)
    if any(isinstance(count, int) and count > 1 for count in counts):
        raise JobError("accumulate: a pipeline accumulates by itself; use parallel.microbatches instead")


def _values(settings: SweepSettings, key: str, default: Any) -> Sequence[Any]:
    """The values that trials have of `key`: those swept, or the job's own."""
    swept = [dimension.ends() for dimension in settings.over if dimension.key == key]
    return swept[0] if swept else (default,)


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule under which trials could not join and leave."""
    if not schedule.synchronous:
        drains = ", ".join(each.value for each in Schedule if each.synchronous)
        raise JobError(
            f"parallel.schedule: found {schedule.value}, expected one that drains ({drains}): trials join "
            f"and leave between two steps, when nothing is in flight; use --set parallel.schedule=flush"
        )
