"""The stages of an array: which plans a sweep can run, and how the workers of a group hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plait.core.errors import InputError, JobError
from plait.pipeline.layout import PipelineLayout, arrange, with_choices
from plait.planner.schedules.kinds import Schedule
from plait.planner.schedules.orders import operations
from plait.schema.plans.plan import Layout
from plait.schema.settings import PipelineSettings
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import is_fusable, with_values

SCHEDULES = (Schedule.FLUSH, Schedule.GPIPE, Schedule.NONE)


def layout_from(first: int, pipeline: PipelineSettings) -> PipelineLayout:
    """The layout of a group whose first worker has rank `first`: each worker holds a stage, in order."""
    layout = _arranged(pipeline)
    stages = tuple((first + stage,) for stage in range(len(layout.stages)))
    return replace(layout, layouts=(Layout(stages),))


def _arranged(pipeline: PipelineSettings) -> PipelineLayout:
    return with_choices(arrange(pipeline.plan), pipeline)


def check_stages_of(settings: SweepSettings) -> None:
    """Refuse a plan or settings that arrays in stages do not support."""
    if settings.train.pipeline is not None:
        _check_plan(settings.train.pipeline)
        check_in_stages(settings)


def check_in_stages(settings: SweepSettings) -> None:
    """Refuse settings that arrays in stages do not support, for any plan."""
    if settings.replicas > 1:
        raise InputError(
            f"--replicas: found {settings.replicas} with a plan; an array is replicated or in stages"
        )
    if settings.width is None:
        raise InputError("--width: found none; how many trials pay in stages is not measured: say it")
    train = settings.train
    if "fp16" in _values(settings, "precision", train.precision):
        raise JobError("precision: found 'fp16', which pipelines cannot scale; use bf16 or float32")
    # What is no number is refused with the job's own words.
    counts = _values(settings, "accumulate", train.accumulate)
    if any(isinstance(count, int) and count > 1 for count in counts):
        raise JobError("accumulate: a pipeline accumulates by itself; use parallel.microbatches instead")
    for kind in _values(settings, "optimizer.kind", train.optimizer.kind):
        if not is_fusable(with_values(train, {"optimizer.kind": kind})):
            raise JobError(
                f"optimizer.kind: found {kind!r} with {dict(train.optimizer.options)}, which is not fused, "
                f"and arrays in stages are; use sgd, adam, adamw, rmsprop, adagrad or adadelta"
            )


def _values(settings: SweepSettings, key: str, default: Any) -> Sequence[Any]:
    """The values that trials have of `key`: those swept, or the job's own."""
    swept = [dimension.ends() for dimension in settings.over if dimension.key == key]
    return swept[0] if swept else (default,)


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule under which trials could not join and leave."""
    if schedule not in SCHEDULES:
        raise JobError(
            f"parallel.schedule: found {schedule.value}, expected flush, gpipe or none: trials join and "
            f"leave between two steps, when nothing is in flight; use --set parallel.schedule=flush"
        )


def _check_plan(pipeline: PipelineSettings) -> None:
    plan = pipeline.plan
    check_schedule(plan.schedule)
    counts = [len(stage.devices) for stage in plan.stages]
    if plan.devices_used != len(counts) or max(counts) > 1:
        raise JobError(
            f"parallel.plan: found stages with {counts} workers on {plan.devices_used} in all, expected one "
            f"stage for each worker; use --plan model-parallel"
        )
    # Refuses depths that deadlock.
    operations(plan.schedule, plan.layout(), plan.microbatches, _arranged(pipeline).depths)
    if plan.recompute or pipeline.recompute:
        raise JobError("parallel.recompute: stages of fused trials cannot run forward twice; leave it out")
