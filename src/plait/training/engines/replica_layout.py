"""Layouts of pipeline replicas that average weights: each replica takes its next work when it is ready.

Every stage has one worker in each replica; these workers average among themselves, independently of other
stages. The workers of a replica run in lockstep: the worker of its first stage takes work for all. A replica
sends all messages of an update before any of its workers waits for another replica, so there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.core.errors import JobError
from plait.pipeline.layout import PipelineLayout
from plait.schema.plans.plan import Layout
from plait.schema.settings import TrainSettings
from plait.schema.sync_options import FAULT_TOLERANT, read_options


def replica_layouts(pipeline_layout: PipelineLayout) -> tuple[PipelineLayout, ...]:
    """The layout of each pipeline replica: the i-th worker of every stage is in the i-th."""
    holders = [
        tuple(w for each in pipeline_layout.layouts for w in each.stages[s]) for s in _stages(pipeline_layout)
    ]
    counts = [len(workers) for workers in holders]
    if len(set(counts)) > 1:
        raise _unlike(counts)
    each = max(1, pipeline_layout.microbatches // counts[0])
    replicas = [Layout(tuple((workers[i],) for workers in holders)) for i in range(counts[0])]
    for layout in replicas:
        if min(layout.workers) != layout.worker(0, 0):
            raise JobError(
                f"parallel.plan: found a pipeline of workers {layout.workers} whose first stage is on worker "
                f"{layout.worker(0, 0)}; expected the lowest of them there"
            )
    return tuple(replace(pipeline_layout, layouts=(layout,), microbatches=each) for layout in replicas)


def among(pipeline_layout: PipelineLayout, members: Sequence[int]) -> PipelineLayout:
    """The layout of the replicas whose workers are all in `members`, with their ranks there."""
    replicas = replica_layouts(pipeline_layout)
    layouts = [
        Layout(tuple(tuple(members.index(w) for w in workers) for workers in each.layout.stages))
        for each in replicas
        if set(each.workers) <= set(members)
    ]
    microbatches = len(layouts) * replicas[0].microbatches
    return replace(pipeline_layout, layouts=tuple(layouts), microbatches=microbatches)


def _unlike(counts: Sequence[int]) -> JobError:
    return JobError(
        f"parallel.plan: found stages with {list(counts)} workers; pipelines side by side need as many in "
        f"every stage, two or more: plan with --pipelines, or use sync: all-reduce"
    )


def _stages(pipeline_layout: PipelineLayout) -> range:
    return range(len(pipeline_layout.stages))


def check_replicas(settings: TrainSettings, pipeline_layout: PipelineLayout) -> None:
    """Refuse settings that replicas which average weights do not support."""
    kind = settings.sync.kind
    if kind not in FAULT_TOLERANT:
        raise JobError(
            f"parallel.sync: found {kind!r} with a pipeline; pipelines agree by all-reduce or, side by side, "
            f"by {', '.join(FAULT_TOLERANT)}"
        )
    if not pipeline_layout.schedule.synchronous:
        raise JobError(
            f"parallel.schedule: found {pipeline_layout.schedule.value} with sync {kind}; pipelines side by "
            f"side average between two batches: use flush, gpipe, zero-bubble or none"
        )
    if settings.clip_norm is not None:
        raise JobError(
            f"clip_norm: needs the whole model's gradient at once, which a pipeline under {kind} never has; "
            f"leave it out, or use sync: all-reduce"
        )
    replicas = replica_layouts(pipeline_layout)
    if len(replicas) < 2:
        raise _unlike([1] * len(pipeline_layout.stages))
    read_options(kind, settings.sync.options, len(replicas))
