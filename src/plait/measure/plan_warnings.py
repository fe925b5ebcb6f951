"""Warnings about a plan, for the user."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.core.units import show_bytes
from plait.pipeline.layout import arrange, microbatches_per_update
from plait.planner import Plan, Schedule
from plait.planner.partition.fits import misfit
from plait.schema.settings import TrainSettings


def describe_clipping(plan: Plan, settings: TrainSettings) -> str:
    """What clip_norm means under an asynchronous schedule; empty if it means the same as elsewhere."""
    if plan.schedule.synchronous or settings.clip_norm is None or len(plan.stages) == 1:
        return ""
    return (
        f"clip_norm: under {plan.schedule.value} each of the {len(plan.stages)} stages clips the norm of its "
        f"own gradient to {settings.clip_norm:g}, as the whole model's is never there at once"
    )


def describe_updates(plan: Plan, settings: TrainSettings) -> str:
    """How many samples an update has under an asynchronous schedule; empty under a synchronous one."""
    if plan.schedule.synchronous:
        return ""
    batch, microbatches = settings.data.batch_size, plan.microbatches
    pipeline_layout = arrange(plan)
    counts = [microbatches_per_update(pipeline_layout, s) * plan.pipelines for s in range(len(plan.stages))]
    if set(counts) == {microbatches}:
        return f"schedule {plan.schedule.value}: an update takes the batch of {batch} samples"
    if plan.schedule is Schedule.STASH:
        several = f"a batch makes {microbatches} microbatches"
        each = "a batch enters the pipeline whole" if microbatches == 1 else several
        rule = f"{each}, and an update takes one for each replica of its stage"
    else:
        rule = f"an update takes {counts[0]} microbatches, and a batch makes {microbatches}"
    shares = _shares([batch * n / microbatches for n in counts])
    return (
        f"schedule {plan.schedule.value}: {rule}: {shares} samples, "
        f"with the learning rate of the job, where data.batch_size is {batch}"
    )


def _shares(samples: Sequence[float]) -> str:
    """The samples per update of each stage, as text."""
    if len(set(samples)) == 1:
        return f"all stages {samples[0]:.0f}"
    return ", ".join(f"stage {stage} about {count:.0f}" for stage, count in enumerate(samples))


def other_microbatch(plan: Plan, settings: TrainSettings) -> str:
    """A warning if the plan was made for another microbatch size; else empty."""
    size = math.ceil(settings.data.batch_size / plan.microbatches)
    if plan.microbatch_samples is None or abs(plan.microbatch_samples - size) <= 1:
        return ""
    return (
        f"parallel.plan: the plan was made for microbatches of {plan.microbatch_samples} samples, but here "
        f"they have {size} (a batch of {settings.data.batch_size} in {plan.microbatches}), so its times and "
        f"memory do not hold; profile with --batch {size}, or set parallel.microbatches"
    )


def describe_memory(plan: Plan) -> str:
    """A warning if a stage needs more memory than its device has; else empty."""
    too_large = misfit(plan.stages, plan.machines)
    if too_large is None:
        return ""
    device, needed, limit = too_large
    return (
        f"parallel.plan: with what the job sets over the plan, device {device} would need "
        f"{show_bytes(needed)}, but was planned to have {show_bytes(limit)}; plan for the job's own "
        f"schedule, leave vertical_sync and deeper depths out, or set parallel.recompute"
    )
