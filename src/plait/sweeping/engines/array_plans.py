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
from plait.training.checks.plan_settings import check_plan
from plait.training.engines.replica_layout import check_replicas, side_by_side


def layout_from(first: int, settings: SweepSettings) -> PipelineLayout:
    """The layout of a group whose first worker has rank `first`: each replica of the plan is a pipeline.

    Where workers average, so is each replica of its stages.
    """
    pipeline = settings.train.stages
    layout = with_choices(arrange(pipeline.plan), pipeline)
    starts = range(first, first + settings.workers_per_array, pipeline.plan.devices_used)
    layouts = tuple(_moved(each, start) for start in starts for each in layout.layouts)
    whole = replace(layout, layouts=layouts)
    return side_by_side(whole) if averages(settings) else whole


def averages(settings: SweepSettings) -> bool:
    """Whether the workers of an array average, rather than sum gradients."""
    return settings.train.sync.kind != "all-reduce"


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
    halves = "fp16" in _values(settings, "precision", settings.train.precision)
    check_plan(replace(settings.train, precision="fp16") if halves else settings.train, None)
    if averages(settings):
        clips = _values(settings, "clip_norm", settings.train.clip_norm)
        clipped = replace(settings.train, clip_norm=next(filter(None, clips), None))
        check_replicas(clipped, layout_from(0, settings))
    pipelines = settings.replicas * plan.pipelines
    if plan.microbatches < pipelines:
        raise InputError(
            f"--replicas: found {settings.replicas} for a plan that cuts a batch into {plan.microbatches} "
            f"microbatches, which {pipelines} pipelines share; use --set parallel.microbatches={pipelines} "
            f"or more, or fewer replicas"
        )


def check_in_stages(settings: SweepSettings) -> None:
    """Refuse settings that arrays in stages do not support, for any plan."""
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
