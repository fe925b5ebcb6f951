"""The stages of a plan, the pipelines that run in parallel, and the operations of each worker."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Protocol

from plait.core.errors import InputError, PlanError
from plait.planner.schedules import orders
from plait.planner.schedules.in_flight import Schedule, in_flight
from plait.planner.schedules.merge_orders import ReplicaOrder, merged_order
from plait.planner.schedules.operations import Backward, Op, Operations, Update
from plait.planner.schedules.orders import batch_of_two_buffers, one_forward_one_backward, operations
from plait.schema.plans.plan import Layout, Plan
from plait.schema.settings import PipelineOptions


@dataclass(frozen=True)
class PipelineLayout:
    """Stages by their layers, and for each pipeline the workers of each stage.

    `microbatches` counts those of all pipelines in a step. `depths` overrides how many microbatches a stage
    has in flight; `recompute` lists the stages that recompute activations in backward.
    """

    stages: tuple[tuple[str, ...], ...]
    layouts: tuple[Layout, ...]
    schedule: Schedule
    microbatches: int
    depths: Mapping[int, int] = field(default_factory=dict)
    vertical_sync: bool = PipelineOptions.vertical_sync
    recompute: frozenset[int] = frozenset()

    @property
    def layout(self) -> Layout:
        """The layout of the first pipeline; the others have the same number of replicas in each stage."""
        return self.layouts[0]

    @property
    def pipelines(self) -> int:
        return len(self.layouts)

    @property
    def last(self) -> int:
        return len(self.stages) - 1

    def pipeline_of(self, worker: int) -> int:
        for number, layout in enumerate(self.layouts):
            if worker in layout.workers:
                return number
        raise PlanError(f"worker {worker} has no stage; the plan uses {self.workers}")

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(sorted({w for layout in self.layouts for w in layout.workers}))

    def stages_of(self, worker: int) -> tuple[int, ...]:
        layout = self.layouts[self.pipeline_of(worker)]
        return tuple(s for s, workers in enumerate(layout.stages) if worker in workers)

    def holders(self, *stages: int) -> tuple[int, ...]:
        """All workers that hold one of `stages`, over all pipelines."""
        return tuple(sorted({w for layout in self.layouts for s in stages for w in layout.stages[s]}))

    def local(self, total: int, pipeline: int) -> int:
        """How many of `total` microbatches a pipeline gets; they are distributed round-robin."""
        return len(range(pipeline, total, self.pipelines))

    @property
    def shared(self) -> bool:
        """Whether a worker holds several stages."""
        return any(layout.shared for layout in self.layouts)

    @cached_property
    def batch_of_two_buffers(self) -> int:
        """Microbatches of one pipeline between two updates under 2bw."""
        # Weights are one batch old, so at most one batch may be in flight.
        flying = [_depth(self, s) * self.layout.replicas(s) for s in range(len(self.stages))]
        return batch_of_two_buffers(self.layout, max(self.local(self.microbatches, 0), *flying))

    def most_in_flight(self) -> int:
        """Upper bound on how many microbatches apart two peers of a worker can be."""
        if self.schedule in (Schedule.GPIPE, Schedule.INTERLEAVED):
            return self.microbatches
        many = max(self.microbatches, 4 * len(self.workers))
        depths = [
            in_flight(self.schedule, self.layout, s, many, self.depths) * self.layout.replicas(s)
            for s in range(len(self.stages))
        ]
        return max(depths)

    def window(self) -> int:
        """How many messages of one channel between two workers may be in flight."""
        return 2 * self.most_in_flight() + 2

    def slack(self) -> int:
        """Upper bound on how many microbatches, of all pipelines, apart workers can be.

        Under an asynchronous schedule this counts from the last microbatch that a worker has scheduled; a
        worker with several stages schedules the microbatches of all workers.
        """
        apart = 2 * self.most_in_flight()
        if self.shared:
            apart += 2 * max(microbatches_per_update(self, stage) for stage in range(len(self.stages)))
        return apart * self.pipelines


def arrange(plan: Plan) -> PipelineLayout:
    """The layout that `plan` describes, with the schedule of the plan."""
    stages = tuple(stage.layers for stage in plan.stages)
    return PipelineLayout(
        stages,
        tuple(plan.layout(p) for p in range(plan.pipelines)),
        plan.schedule,
        plan.microbatches,
        dict(enumerate(plan.depths)),
        recompute=frozenset(range(len(stages))) if plan.recompute else frozenset(),
    )


def with_choices(pipeline_layout: PipelineLayout, choices: PipelineOptions) -> PipelineLayout:
    """The layout with the pipeline options of the job, which a plan does not contain."""
    return replace(
        pipeline_layout,
        depths={**pipeline_layout.depths, **choices.depths},
        vertical_sync=choices.vertical_sync,
        recompute=pipeline_layout.recompute | frozenset(choices.recompute),
    )


def check_depths(pipeline_layout: PipelineLayout) -> None:
    """Raise PlanError for depths that deadlock.

    It is enough to check the largest number of microbatches between two drains: with fewer, the order is the
    same with some left out. For asynchronous schedules, which may never drain, a few rounds of the
    microbatches in flight are checked.
    """
    layout, schedule = pipeline_layout.layout, pipeline_layout.schedule
    many, batch = max(1, pipeline_layout.local(pipeline_layout.microbatches, 0)), 1
    if not schedule.synchronous:
        many = 4 * len(layout.workers) + 3 * pipeline_layout.most_in_flight()
    if schedule is Schedule.TWO_BUFFERED:
        batch = pipeline_layout.batch_of_two_buffers
        many += 3 * batch
    operations(schedule, layout, many, pipeline_layout.depths, batch)


def one_batch(pipeline_layout: PipelineLayout, worker: int, microbatches: int) -> tuple[Op, ...]:
    """A worker's operations for one batch under a synchronous schedule; all end with an update."""
    layout = pipeline_layout.layouts[pipeline_layout.pipeline_of(worker)]
    if microbatches == 0:
        return tuple(Update(stage, 1) for stage in pipeline_layout.stages_of(worker))
    depths = tuple(sorted(pipeline_layout.depths.items()))
    return _operations(pipeline_layout.schedule, layout, microbatches, depths)[worker]


@lru_cache(maxsize=16)
def _operations(
    schedule: Schedule, layout: Layout, microbatches: int, depths: tuple[tuple[int, int], ...]
) -> Operations:
    """The operations of a batch; cached, as each step needs them and batches have few sizes."""
    return operations(schedule, layout, microbatches, dict(depths))


def microbatches_per_update(pipeline_layout: PipelineLayout, stage: int) -> int:
    """How many microbatches of one pipeline make one update of `stage` under an asynchronous schedule."""
    if pipeline_layout.schedule is Schedule.STASH:
        return pipeline_layout.layout.replicas(stage)
    return pipeline_layout.batch_of_two_buffers


class MicrobatchInterval(Protocol):
    """The microbatches that an asynchronous pipeline takes before it drains.

    `total` counts them over all pipelines. It may shrink while they run, but never below what has started.
    """

    @property
    def total(self) -> int: ...

    def admits(self, pipeline: int, microbatch: int) -> bool:
        """Whether the interval still includes this microbatch; earlier forwards of its pipeline are done."""


def stream(pipeline_layout: PipelineLayout, worker: int, interval: MicrobatchInterval) -> Iterator[Op]:
    """A worker's operations under an asynchronous schedule, generated lazily.

    If workers hold several stages, each simulates all workers, so that all derive the same order.
    """
    if not pipeline_layout.shared:
        (stage,) = pipeline_layout.stages_of(worker)
        return _ops_of_replica(pipeline_layout, pipeline_layout.pipeline_of(worker), stage, worker, interval)
    orders = [
        ReplicaOrder(holder, _ops_of_replica(pipeline_layout, pipeline, stage, holder, interval), pipeline)
        for pipeline, layout in enumerate(pipeline_layout.layouts)
        for stage, holders in enumerate(layout.stages)
        for holder in holders
    ]
    every = merged_order(orders, pipeline_layout.last, lambda stage: len(pipeline_layout.holders(stage)))
    return (op for who, op in every if who == worker)


def _ops_of_replica(
    pipeline_layout: PipelineLayout, pipeline: int, stage: int, worker: int, interval: MicrobatchInterval
) -> Iterator[Op]:
    """The operations of a worker for one of its stages."""
    layout = pipeline_layout.layouts[pipeline]
    replicas = layout.replicas(stage)
    return one_forward_one_backward(
        stage,
        layout.stages[stage].index(worker),
        replicas,
        _depth(pipeline_layout, stage),
        microbatches_per_update(pipeline_layout, stage) // replicas,
        version=partial(version_of, pipeline_layout, stage),
        admits=partial(interval.admits, pipeline),
        total=lambda: pipeline_layout.local(interval.total, pipeline),
        rounds=lambda: math.ceil(pipeline_layout.local(interval.total, 0) / replicas),
    )


def update_behind(pipeline_layout: PipelineLayout, backward: Backward) -> Update | None:
    """The update that directly follows `backward` in its stage, or None.

    Under an asynchronous schedule. The last update of an interval may follow another backward.
    """
    replicas = pipeline_layout.layout.replicas(backward.stage)
    every = microbatches_per_update(pipeline_layout, backward.stage) // replicas
    updates, rest = divmod(backward.microbatch // replicas + 1, every)
    return None if rest else Update(backward.stage, updates)


def _depth(pipeline_layout: PipelineLayout, stage: int) -> int:
    return in_flight(pipeline_layout.schedule, pipeline_layout.layout, stage, 1 << 60, pipeline_layout.depths)


def version_of(pipeline_layout: PipelineLayout, stage: int, microbatch: int) -> int:
    """The weight version that a microbatch uses in `stage` under an asynchronous schedule."""
    layout, replicas = pipeline_layout.layout, pipeline_layout.layout.replicas(stage)
    every = microbatches_per_update(pipeline_layout, stage) // replicas
    depth = _depth(pipeline_layout, stage)
    updates = orders.version_of(pipeline_layout.schedule, microbatch, replicas, depth, every)
    if not pipeline_layout.vertical_sync or pipeline_layout.schedule is not Schedule.STASH:
        return updates
    first = layout.replicas(0)
    entered = max(0, microbatch // first - _depth(pipeline_layout, 0) + 1)
    version = entered * first // replicas
    if version > updates:
        raise PlanError(
            f"vertical_sync: stage {stage} would need version {version} for microbatch {microbatch} but has "
            f"made {updates}; give the first stage more microbatches in flight than later ones"
        )
    return version


def oldest_needed(pipeline_layout: PipelineLayout, worker: int, update: Update) -> int:
    """The weight version that a worker's next forward in the stage uses after `update`."""
    stage = update.stage
    layout = pipeline_layout.layouts[pipeline_layout.pipeline_of(worker)]
    replicas, replica = layout.replicas(stage), layout.stages[stage].index(worker)
    backwards = update.version * (microbatches_per_update(pipeline_layout, stage) // replicas)
    forwards = backwards + _depth(pipeline_layout, stage) - 1
    return version_of(pipeline_layout, stage, replica + forwards * replicas)


def check_compiled(schedule: Schedule) -> None:
    """Refuse a schedule that needs parts of a backward which compiled stages do not have."""
    if schedule is Schedule.ZERO_BUBBLE:
        raise InputError(
            "compile: found schedule zero-bubble, which takes backward apart, and that of a compiled stage "
            "is one piece; use schedule flush, or do not compile"
        )
