"""A plan: the stages of a model, their devices and replicas, the schedule, and the predicted costs."""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.errors import PlanError
from plait.schema.plans.cluster import Cluster
from plait.schema.plans.schedules import Schedule

# Simulating a step of this many microbatches takes seconds.
MOST_MICROBATCHES = 1 << 16


@dataclass(frozen=True)
class Layout:
    """The workers of each stage, in order; a worker that holds several stages is named in each.

    Microbatch b goes through replica b mod R of a stage with R replicas, whatever the other stages have.
    """

    stages: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.stages or any(not workers for workers in self.stages):
            raise PlanError(
                f"found stages {self.stages}, expected at least one with at least one worker each"
            )
        for stage, workers in enumerate(self.stages):
            if len(set(workers)) < len(workers):
                raise PlanError(f"stage {stage}: found workers {workers}, expected each of them once")

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(sorted({worker for workers in self.stages for worker in workers}))

    @property
    def shared(self) -> bool:
        """Whether a worker holds several stages."""
        return len(self.workers) < self.devices_from(0)

    def replicas(self, stage: int) -> int:
        return len(self.stages[stage])

    def devices_from(self, stage: int) -> int:
        """Replicas of this stage and of all that follow."""
        return sum(len(workers) for workers in self.stages[stage:])

    def worker(self, stage: int, microbatch: int) -> int:
        """The worker that runs this microbatch in this stage."""
        workers = self.stages[stage]
        return workers[microbatch % len(workers)]


@dataclass(frozen=True)
class Tied:
    """Weights that a stage shares with others: all of them, and those counted by another stage.

    `waiting_bytes` are gradients kept until the first of these stages updates, with the stash schedule.
    """

    shared_bytes: float = 0.0
    copied_bytes: float = 0.0
    waiting_bytes: float = 0.0


@dataclass(frozen=True)
class Stage:
    """A slice of the model: its layers (node ids in order) and the devices that replicate it.

    Seconds and bytes are for one microbatch on one replica. `cost_s` is what the stage adds to the
    bottleneck: compute, updates and synchronisation, shared by its replicas; messages are counted apart.
    `activation_bytes` is what autograd keeps besides the stage's inputs, `working_bytes` what a layer at work
    takes besides. `in_flight` microbatches are held at most, and `memory_bytes` is what a device needs for
    all that (planner/stage_memory.py).
    """

    layers: tuple[str, ...]
    replicas: int
    devices: tuple[int, ...]
    forward_s: float
    backward_s: float
    cost_s: float
    update_s: float
    parameter_bytes: float
    buffer_bytes: float
    activation_bytes: float
    input_bytes: float
    output_bytes: float
    in_flight: int
    memory_bytes: float
    working_bytes: float = 0.0
    tied: Tied = Tied()

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def summed_bytes(self) -> float:
        """The bytes of gradients that its replicas sum, without tied weights; 0 without replicas."""
        not_tied = self.parameter_bytes + self.tied.copied_bytes - self.tied.shared_bytes
        return not_tied if self.replicas > 1 else 0.0

    @property
    def traffic_bytes(self) -> float:
        """Bytes exchanged with the previous and the next stage: activations and gradients."""
        return 2 * (self.input_bytes + self.output_bytes)


@dataclass(frozen=True)
class Speedups:
    """How many times faster the plan is than one device, data parallelism and model parallelism."""

    single: float
    data_parallel: float
    model_parallel: float


@dataclass(frozen=True)
class BestPartition:
    """The best partition by its bottleneck: seconds per microbatch in the steady state, and replicas."""

    bottleneck_s: float
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The planner's decision and its predicted costs.

    `bottleneck_s` is the time per microbatch in the steady state, `lower_bound_s` a lower bound of it for any
    plan, `exact` whether the plan is proven optimal, `solve_s` the time of the search. `other_cut` is the
    best partition by bottleneck if another plan was chosen. `step_s` and `idle_share` come from simulating
    the schedule with `microbatches`. With several `pipelines`, each has an equal share of every stage's
    devices.
    `depths`, if given, overrides the number of microbatches that each stage keeps in flight.
    `microbatch_samples` is that of the profile, if known.

    Examples:
        ```py
        plan = plait.plan(profile, plait.machines(2, 1e9))
        print(plan.step_s, [stage.layers for stage in plan.stages])
        ```
    """

    stages: tuple[Stage, ...]
    machines: Cluster
    schedule: Schedule
    microbatches: int
    pipelines: int
    bottleneck_s: float
    lower_bound_s: float
    solve_s: float
    exact: bool
    step_s: float
    idle_share: float
    speedup_over: Speedups
    optimizer_copies: float
    recompute: bool
    why: str
    depths: tuple[int, ...] = ()
    microbatch_samples: int | None = None
    other_cut: BestPartition | None = None

    @property
    def best_partition(self) -> BestPartition:
        """The best partition by bottleneck, whether or not it is this plan's."""
        this = BestPartition(self.bottleneck_s, tuple(stage.replicas for stage in self.stages))
        return self.other_cut or this

    @property
    def devices_used(self) -> int:
        return len({device for stage in self.stages for device in stage.devices})

    def layout(self, pipeline: int = 0) -> Layout:
        """The workers of each stage of one pipeline."""
        slices = []
        for stage in self.stages:
            share = len(stage.devices) // self.pipelines
            slices.append(stage.devices[pipeline * share : (pipeline + 1) * share])
        return Layout(tuple(slices))
