"""Layouts of pipeline replicas that average weights: each replica takes its next work when it is ready.

Every stage has one worker in each replica; these workers average among themselves, independently of other
stages. The workers of a replica run in lockstep: the worker of its first stage takes work for all. A replica
sends all messages of an update before any of its workers waits for another replica, so there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.core.errors import JobError, PlaitError
from plait.pipeline.layout import PipelineLayout
from plait.schema.plans.plan import Layout
from plait.schema.settings import TrainSettings
from plait.schema.sync_options import read_options


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
    return tuple(replace(pipeline_layout, layouts=(layout,), microbatches=each) for layout in replicas)


def workers_of_replica(pipeline_layout: PipelineLayout) -> int:
    """How many workers one pipeline replica has."""
    return len(replica_layouts(pipeline_layout)[0].workers)


def side_by_side(pipeline_layout: PipelineLayout) -> PipelineLayout:
    """The layout with each pipeline replica as a pipeline."""
    return replace(pipeline_layout, layouts=tuple(each.layout for each in replica_layouts(pipeline_layout)))


def in_order(replica: PipelineLayout) -> tuple[int, ...]:
    """The workers of a replica by position, in the order of their first stages."""
    return tuple(dict.fromkeys(worker for (worker,) in replica.layout.stages))


def among(pipeline_layout: PipelineLayout, positions: Sequence[int | None]) -> PipelineLayout:
    """The replicas of a plan's layout for other workers, each a pipeline; workers left over have no stage.

    `positions` has, for each rank, the position whose stages the worker holds already, if any: as many as
    possible keep theirs. Rank 0, which keeps the record, is the first worker of the first replica.
    """
    replicas = replica_layouts(pipeline_layout)
    workers = in_order(replicas[0])
    count = len(positions) // len(workers)
    if count == 0:
        raise PlaitError(
            f"found {len(positions)} of the {len(workers)} workers that a pipeline of the plan needs; go on "
            f"with --resume and more workers"
        )
    if len(positions) == len(pipeline_layout.workers) and all(each is None for each in positions):
        return side_by_side(pipeline_layout)
    chosen: list[list[int]] = [[0], *([] for _ in workers[1:])]
    for rank, position in enumerate(positions):
        if rank > 0 and position is not None and len(chosen[position]) < count:
            chosen[position].append(rank)
    taken = {rank for ranks in chosen for rank in ranks}
    free = (rank for rank in range(len(positions)) if rank not in taken)
    for ranks in chosen:
        ranks += [next(free) for _ in range(count - len(ranks))]
        ranks.sort()
    by_stage = [workers.index(worker) for (worker,) in replicas[0].layout.stages]
    layouts = [Layout(tuple((chosen[position][i],) for position in by_stage)) for i in range(count)]
    return replace(pipeline_layout, layouts=tuple(layouts))


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
    if not pipeline_layout.schedule.synchronous:
        raise JobError(
            f"parallel.schedule: found {pipeline_layout.schedule.value} with sync {kind}; pipelines side by "
            f"side average between two batches: use flush, gpipe, zero-bubble or none"
        )
    if settings.clip_norm is not None:
        raise JobError(
            f"clip_norm: needs the whole model's gradient at once, which pipelines that average never have; "
            f"found sync {kind}: leave clip_norm out, or use sync: all-reduce"
        )
    replicas = replica_layouts(pipeline_layout)
    if len(replicas) < 2:
        raise _unlike([1] * len(pipeline_layout.stages))
    first = replicas[0].layout
    if first.worker(0, 0) != 0:
        raise JobError(
            f"parallel.plan: found a pipeline of workers {first.workers} whose first stage is on worker "
            f"{first.worker(0, 0)}; expected worker 0, which keeps the record, there"
        )
    read_options(kind, settings.sync.options, len(replicas), "pipeline")
