"""A plan: which layers run where, how often replicated, in which schedule, with what it should cost."""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.errors import PlanError
from plait.schema.plans.cluster import Cluster
from plait.schema.plans.schedules import Schedule

# Replaying a step of this many microbatches takes seconds.
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
        """Who runs this microbatch in this stage."""
        workers = self.stages[stage]
        return workers[microbatch % len(workers)]


@dataclass(frozen=True)
class Tied:
    """Weights that a stage shares with others: all of them, and those that another stage counts as its own.

    `waiting_bytes` are gradients that wait for the first of these stages, under stash.
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
        """What its own gradients are summed in, where it has replicas."""
        own = self.parameter_bytes + self.tied.copied_bytes - self.tied.shared_bytes
        return own if self.replicas > 1 else 0.0

    @property
    def traffic_bytes(self) -> float:
        """Bytes exchanged with the stages before and behind: activations one way, gradients the other."""
        return 2 * (self.input_bytes + self.output_bytes)


@dataclass(frozen=True)
class Speedups:
    """How many times faster the plan is than each of the plain ways."""

    single: float
    data_parallel: float
    model_parallel: float


@dataclass(frozen=True)
class BestPartition:
    """The best cut by its bottleneck: seconds a microbatch in the steady state, replicas of each stage."""

    bottleneck_s: float
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What the planner decided, and what it predicts.

    `bottleneck_s` is seconds a microbatch in the steady state, `lower_bound_s` what no plan can go below,
    `exact` whether the plan is proven best, `solve_s` what the whole search took. `other_cut` is the best cut
    by bottleneck where another plan was taken. `step_s` and `idle_share` come from replaying the schedule
    with `microbatches`. With several `pipelines`, every stage's devices are dealt to them in equal slices.
    `depths`, where given, are the microbatches that each stage keeps in flight instead of the schedule's
    own number. `microbatch_samples` are those of the profile that it was made from, where that is known.
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
        """The best cut that was found, whether or not it is this plan."""
        own = BestPartition(self.bottleneck_s, tuple(stage.replicas for stage in self.stages))
        return self.other_cut or own

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
