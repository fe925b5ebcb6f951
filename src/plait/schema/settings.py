"""The settings of a job and of its workers as dataclasses: each key and each default is defined once.

The sections of a job file are these classes, key by key (`plait.schema.job_model` validates a file against
their types and limits). Where workers run is in `placement.py`, the options of each sync in
`sync_options.py`, and the keys that only a file has in `job_settings.py`. Settings that workers receive in
another form than the file has are at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args

from plait.schema.limits import (
    Count,
    CountFromZero,
    ExtraKeys,
    InFlight,
    KeyLimits,
    NonEmpty,
    OneOf,
    StageNumber,
    Workers,
)
from plait.schema.placement import ElasticRules, HostAccess, WorkerLimits
from plait.schema.plans.graph import Graph
from plait.schema.plans.plan import Plan
from plait.schema.plans.schedules import Schedule
from plait.schema.sync_options import AUTO, KINDS
from plait.schema.topology_spec import TopologySpec

Precision = Literal["float32", "float64", "bf16", "fp16"]
# When the stages or the fused trials are compared with the plain model: never, once, or at every start.
VerifyStart = Literal["off", "first", "every_run"]
# A sync, or `auto`, which measures the first steps and chooses one.
SyncName = Annotated[str, OneOf((*KINDS, AUTO))]
# Whether less or more of a metric is better.
Mode = Literal["min", "max"]
Monitor = Literal["loss", "throughput", "step-time", "link-throughput", "noise-scale", "variance"]
SearchKind = Literal["grid", "random", "halving", "asha", "pbt", "study"]
SEARCHES: tuple[SearchKind, ...] = get_args(SearchKind)


@dataclass(frozen=True)
class DataSettings:
    """The data set and how batches are drawn from it; `batch_size` counts samples over all workers.

    `collate_fn` is the `package.module:function` that makes a batch from a list of samples.
    """

    kind: str
    batch_size: Count
    options: ExtraKeys = field(default_factory=dict)
    shuffle: bool = True
    last_batch: Literal["keep", "drop"] = "keep"
    loaders: Annotated[int, KeyLimits(ge=0, le=1024)] = 0
    collate_fn: str | None = None


@dataclass(frozen=True)
class LoraSettings:
    """A LoRA adapter of the PEFT library on the model, whose own weights are frozen.

    Without `target_modules`, it adapts the layers that PEFT chooses for the model. Further keys are options
    of PEFT's LoraConfig, such as `use_dora` and `use_rslora`.
    """

    r: Count = 8
    alpha: Annotated[float, KeyLimits(gt=0)] = 8.0
    dropout: Annotated[float, KeyLimits(ge=0, lt=1)] = 0.0
    target_modules: tuple[NonEmpty, ...] = ()
    options: ExtraKeys = field(default_factory=dict)


@dataclass(frozen=True)
class GroupSettings:
    """A parameter group: the parameters whose names match a pattern, and their optimizer options."""

    match: NonEmpty
    options: ExtraKeys = field(default_factory=dict)


@dataclass(frozen=True)
class EmaSettings:
    """An exponential moving average of the weights, and whether evaluations use it in their place."""

    decay: Annotated[float, KeyLimits(ge=0, lt=1)] = 0.999
    evaluate: bool = True


@dataclass(frozen=True)
class OptimizerSettings:
    """`kind` is any optimizer of torch.optim in lower case, or `package.module:name`.

    The options of the first of `groups` that a parameter's name matches override the others. With `ema` an
    average of the weights is part of its state.
    """

    kind: str = "sgd"
    options: ExtraKeys = field(default_factory=dict)
    groups: tuple[GroupSettings, ...] = ()
    ema: EmaSettings | None = None


@dataclass(frozen=True)
class LrScheduleSettings:
    """The learning-rate schedule: a factor on the optimizer's rate as a function of the step."""

    kind: str = "constant"
    warmup_steps: CountFromZero = 0
    options: ExtraKeys = field(default_factory=dict)


@dataclass(frozen=True)
class CallSettings:
    """A user's code, as `package.module:name`, and the options that it is called with."""

    call: NonEmpty
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricSettings(CallSettings):
    """A metric: a name, or code; what it is called in results, and whether less or more of it is better."""

    mode: Mode | None = None
    name: NonEmpty | None = None


@dataclass(frozen=True)
class EvaluateSettings:
    """When to evaluate on the test split, and the metric to compute besides the loss, or several `metrics`.

    `mode` says whether a smaller or a larger metric is better, for a metric that does not define it. The
    first `sanity_batches` are evaluated before the first step, so that errors appear early.
    """

    every_steps: Count | None = None
    metric: str = "auto"
    metrics: tuple[MetricSettings, ...] = ()
    mode: Mode | None = None
    batch_size: Count | None = None
    sanity_batches: CountFromZero = 2


@dataclass(frozen=True)
class EarlyStopSettings:
    """Stop when `metric` has not improved by `min_change` for `patience` evaluations."""

    patience: Count
    metric: str = "loss"
    min_change: Annotated[float, KeyLimits(ge=0)] = 0.0


@dataclass(frozen=True)
class CheckpointSettings:
    """When to write checkpoints and which to keep; `keep_best` names the metric of the best one."""

    every_steps: Count = 1000
    keep_last: Count = 2
    keep_best: str | None = None


@dataclass(frozen=True)
class VerifySettings:
    """What is compared with plain PyTorch: what is built, at the `start`, and steps of the run, by `audit`.

    Audited are steps 1, 2, 8, 128, ... and some steps after evaluations (`doubling`), or these alone. On a
    difference the run stops, or warns and goes on.
    """

    start: VerifyStart = "first"
    audit: Literal["doubling", "evaluations", "off"] = "doubling"
    on_difference: Literal["stop", "warn"] = "stop"


UNVERIFIED = VerifySettings("off", "off")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of a pipelined run that are not part of its plan.

    `depths` overrides the number of microbatches that a stage keeps in flight; `recompute` lists stages that
    use activation checkpointing, in addition to those of the plan.
    """

    vertical_sync: bool = False
    depths: Mapping[StageNumber, InFlight] = field(default_factory=dict)
    recompute: tuple[StageNumber, ...] = ()


@dataclass(frozen=True)
class PlanRequest(PipelineOptions):
    """Which plan a job uses, by name or file, and what it overrides of it."""

    plan: str = "data-parallel"
    schedule: Schedule | None = None
    microbatches: Count | None = None

    @property
    def needs_planning(self) -> bool:
        """Whether the job is profiled and planned, rather than run with a plan file or without a plan."""
        return self.plan in ("auto", "model-parallel")

    @property
    def leaves_microbatches_open(self) -> bool:
        """Whether the planner may choose the microbatches, and whether an update waits for all of them."""
        return (
            self.plan == "auto"
            and self.schedule is None
            and self.microbatches is None
            and not (self.vertical_sync or self.depths or self.recompute)
        )


@dataclass(frozen=True)
class SyncSettings:
    """How workers with the same weights synchronize: a kind of sync, or `auto`, and its options."""

    kind: SyncName = "all-reduce"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SlowSettings:
    """Injected stragglers: slowdown `factors` by rank, and `jitter` as (probability, seconds) per step."""

    factors: Mapping[int, float] = field(default_factory=dict)
    jitter: tuple[float, float] | None = None


@dataclass(frozen=True)
class PolicySettings:
    """A policy that may change the running job: built in, or `package.module:function`, and its options."""

    kind: str
    options: ExtraKeys = field(default_factory=dict)


@dataclass(frozen=True)
class ParallelSettings(PlanRequest, WorkerLimits, ElasticRules):
    """The number of workers, whether it may change, and how workers share the work."""

    workers: Workers | None = None
    elastic: bool = False
    sync: SyncName = SyncSettings.kind
    sync_options: Mapping[str, Any] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: tuple[float, float] | None = SlowSettings.jitter
    topology: str = TopologySpec.name


@dataclass(frozen=True)
class ClusterSettings(HostAccess):
    """The hosts, as `name:workers`, and how they are reached."""

    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommonSettings:
    """Settings that the job file and the workers have in common; only the type of `model` differs."""

    name: Annotated[str, KeyLimits(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    model: object
    data: DataSettings
    _: KW_ONLY
    loss: str = "cross-entropy"
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    lr_schedule: LrScheduleSettings = field(default_factory=LrScheduleSettings)
    epochs: Annotated[int, KeyLimits(ge=1, le=1 << 31)] | None = None
    steps: Count | None = None
    seed: Annotated[int, KeyLimits(ge=0, lt=1 << 63)] = 0
    precision: Precision = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    clip_norm: Annotated[float, KeyLimits(gt=0)] | None = None
    accumulate: Count = 1
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    early_stop: EarlyStopSettings | None = None
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    tensorboard: bool = False
    callbacks: tuple[CallSettings, ...] = ()
    log_every_steps: Count | None = None
    stop_on_nan: bool = True
    verify: VerifySettings = field(default_factory=VerifySettings)
    monitor: tuple[Monitor, ...] = ()
    adapt: tuple[PolicySettings, ...] = ()


def values_of(group: type[Any], source: Any) -> dict[str, Any]:
    """The values of `source` for the fields of `group`, one of its base classes."""
    return {each.name: getattr(source, each.name) for each in fields(group)}


@dataclass(frozen=True)
class LoraArray:
    """The form that the adapters of a sweep have in common, so that arrays can hold them side by side.

    Ranks are raised to `rank` by zeros (0: they stay as they are), and with `drops` all have a dropout.
    Layers that others of the `targets` adapt have an adapter of zeros.
    """

    rank: int = 0
    drops: bool = False
    targets: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class ModelSettings:
    """The factory of the model, as `package.module:name`, its arguments, and the adapter on it."""

    factory: str
    args: Mapping[str, Any] = field(default_factory=dict)
    adapter: LoraSettings | None = None
    lora_array: LoraArray | None = None


@dataclass(frozen=True)
class PipelineSettings(PipelineOptions):
    """The plan to run, and the options of the run.

    `graph` holds the measured costs of the job's layers, if the plan may be changed during the run. With
    `as_data_parallel` the plan is that every worker holds the whole model, and so the workers do without a
    pipeline; it is kept for runs that go on.
    """

    plan: Plan
    graph: Graph | None = None
    as_data_parallel: bool = False


@dataclass(frozen=True)
class TrainSettings(CommonSettings):
    """The settings that workers receive; without `pipeline` every worker holds the whole model."""

    model: ModelSettings
    _: KW_ONLY
    pipeline: PipelineSettings | None = None
    topology: TopologySpec = field(default_factory=TopologySpec)
    sync: SyncSettings = field(default_factory=SyncSettings)
    slow: SlowSettings = field(default_factory=SlowSettings)

    @property
    def in_stages(self) -> bool:
        """Whether each worker holds stages of the model, by a plan, rather than all of it."""
        return self.pipeline is not None

    @property
    def stages(self) -> PipelineSettings:
        """The plan and the options of a run in stages."""
        assert self.pipeline is not None
        return self.pipeline

    def with_stages(self, **changes: Any) -> TrainSettings:
        """The settings of a run in stages with `changes` to its plan or its options."""
        return replace(self, pipeline=replace(self.stages, **changes))

    def as_run(self) -> TrainSettings:
        """The settings that workers use: without a pipeline if the plan is data parallelism."""
        return replace(self, pipeline=None) if self.in_stages and self.stages.as_data_parallel else self


@dataclass(frozen=True)
class StudySettings:
    """The study of Optuna that a sweep's trials belong to.

    `storage` is a URL, `package.module:name` of a storage, or empty for a file in the run's folder. `sampler`
    and `pruner` are `package.module:name` of one or of what makes one, or empty for Optuna's own.
    """

    name: str = ""
    storage: str = ""
    sampler: str = ""
    pruner: str = ""


@dataclass(frozen=True)
class SearchSettings:
    """How the trials of a sweep are chosen and compared.

    `trials` is the number of trials to sample, unless the search is a grid. Halving and ASHA keep one trial
    in `eta` at each rung, the first of which is at `least_steps`; population-based training copies every
    `least_steps`, and the pruner of a `study` is asked so often. Trials are compared by `metric`: `auto` is
    the metric of the evaluation if it has one, else the loss; less or more is better as
    `EvaluateSettings.mode` says.
    """

    kind: SearchKind = "grid"
    trials: int | None = None
    eta: int = 3
    least_steps: int | None = None
    metric: str = "auto"
    seed: int = 0
    study: StudySettings = field(default_factory=StudySettings)
