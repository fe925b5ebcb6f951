"""What a job says and what its workers are told, as plain values; every key and every default is here, once.

The sections of a job file are these classes, key by key (`plait.schema.job_model` checks a file against
their types and limits). What a worker is told in other words than the file has is at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

from plait.schema.limits import (
    Count,
    CountFromZero,
    FurtherKeys,
    InFlight,
    KeyLimits,
    NonEmpty,
    OneOf,
    StageNumber,
    Workers,
)
from plait.schema.placement import ElasticRules, HostAccess, WorkerLimits
from plait.schema.schedules import Schedule
from plait.schema.sync_options import KINDS
from plait.schema.topology_spec import TopologySpec

Precision = Literal["float32", "float64", "bf16", "fp16"]
# Whether what a run built is compared with the plain model first: never, once, or at every start.
Verify = Literal["off", "first", "every_run"]
# A sync, or `auto`: the first steps are measured, then one is chosen.
SyncName = Annotated[str, OneOf((*KINDS, "auto"))]
Monitor = Literal["loss", "throughput", "step-time", "link-throughput", "noise-scale", "variance"]
SearchKind = Literal["grid", "random", "halving", "asha", "pbt"]
SEARCHES: tuple[SearchKind, ...] = get_args(SearchKind)


@dataclass(frozen=True)
class DataSettings:
    """The data set and how batches are drawn from it; `batch_size` counts samples over all workers.

    `collate_fn` names, as `package.module:function`, what makes a batch of a list of samples.
    """

    kind: str
    batch_size: Count
    options: FurtherKeys = field(default_factory=dict)
    shuffle: bool = True
    last_batch: Literal["keep", "drop"] = "keep"
    loaders: Annotated[int, KeyLimits(ge=0, le=1024)] = 0
    collate_fn: str | None = None


@dataclass(frozen=True)
class GroupSettings:
    """Parameters, by patterns that their names match, that have options of their own."""

    match: NonEmpty
    options: FurtherKeys = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerSettings:
    """`kind` is any optimizer of torch.optim in lower case, or `package.module:name`.

    A parameter has the options of the first of `groups` that its name matches put over the others.
    """

    kind: str = "sgd"
    options: FurtherKeys = field(default_factory=dict)
    groups: tuple[GroupSettings, ...] = ()


@dataclass(frozen=True)
class LrScheduleSettings:
    """How the learning rate changes: a factor on the optimizer's, as a function of the step."""

    kind: str = "constant"
    warmup_steps: CountFromZero = 0
    options: FurtherKeys = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateSettings:
    """When to evaluate on the test split, and by which metric beside the loss."""

    every_steps: Count | None = None
    metric: str = "auto"
    batch_size: Count | None = None


@dataclass(frozen=True)
class EarlyStopSettings:
    """End when `metric` has not improved by `min_change` for `patience` evaluations."""

    patience: Count
    metric: str = "loss"
    min_change: Annotated[float, KeyLimits(ge=0)] = 0.0


@dataclass(frozen=True)
class CheckpointSettings:
    """When to write checkpoints and which to keep; `keep_best` names the metric of the best one."""

    every_steps: Count = 1000
    keep_last: Count = 2
    keep_best: str | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What a run may choose besides its plan.

    `depths` overrides how many microbatches a stage keeps in flight; `recompute` names stages that run
    forward again instead of keeping activations, beside those that the plan asks for.
    """

    vertical_sync: bool = False
    depths: Mapping[StageNumber, InFlight] = field(default_factory=dict)
    recompute: tuple[StageNumber, ...] = ()


@dataclass(frozen=True)
class PlanRequest(PipelineOptions):
    """What a job says of its plan: its name or file, and what it sets over that."""

    plan: str = "data-parallel"
    schedule: Schedule | None = None
    microbatches: Count | None = None

    @property
    def is_made(self) -> bool:
        """Whether the job is measured and a plan made of that, rather than read or not needed."""
        return self.plan in ("auto", "model-parallel")

    @property
    def leaves_pieces_open(self) -> bool:
        """Whether the planner may choose how a batch is cut, and whether updates wait for all of it."""
        return (
            self.plan == "auto"
            and self.schedule is None
            and self.microbatches is None
            and not (self.vertical_sync or self.depths or self.recompute)
        )


@dataclass(frozen=True)
class SyncSettings:
    """How workers that hold the same model agree: a kind of sync, or `auto`, and its options."""

    kind: SyncName = "all-reduce"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SlowSettings:
    """Workers made slow on purpose: `factors` by rank, and `jitter` as (probability, seconds) a step."""

    factors: Mapping[int, float] = field(default_factory=dict)
    jitter: tuple[float, float] | None = None


@dataclass(frozen=True)
class PolicySettings:
    """A policy that may change the running job: a kind of ours, or `package.module:function`, and options."""

    kind: str
    options: FurtherKeys = field(default_factory=dict)


@dataclass(frozen=True)
class ParallelSettings(PlanRequest, WorkerLimits, ElasticRules):
    """How many workers there are, whether they may come and go, and how they share the work."""

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
    """What the job file says and workers are told in the same words, but for how each names the model."""

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
    clip_norm: Annotated[float, KeyLimits(gt=0)] | None = None
    accumulate: Count = 1
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    early_stop: EarlyStopSettings | None = None
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    tensorboard: bool = False
    log_every_steps: Count | None = None
    stop_on_nan: bool = True
    verify: Verify = "first"
    monitor: tuple[Monitor, ...] = ()
    adapt: tuple[PolicySettings, ...] = ()


def values_of(group: type[Any], source: Any) -> dict[str, Any]:
    """The values that `source` has for the fields of `group`, which is a base of it."""
    return {each.name: getattr(source, each.name) for each in fields(group)}


@dataclass(frozen=True)
class ModelSettings:
    """The factory of the model, as `package.module:name`, and its arguments."""

    factory: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PipelineSettings(PipelineOptions):
    """A plan to run, as its file holds it, and what a run chooses besides.

    `graph` is what the job's layers were measured to cost, where the plan may be made anew while it runs.
    """

    plan: Mapping[str, Any]
    graph: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TrainSettings(CommonSettings):
    """One training run; without `pipeline` every worker holds the whole model."""

    model: ModelSettings
    _: KW_ONLY
    pipeline: PipelineSettings | None = None
    topology: TopologySpec = field(default_factory=TopologySpec)
    sync: SyncSettings = field(default_factory=SyncSettings)
    slow: SlowSettings = field(default_factory=SlowSettings)


@dataclass(frozen=True)
class SearchSettings:
    """How the trials of a sweep are chosen and compared.

    `trials` is how many to draw where they are drawn. One in `eta` goes on at each rung of halving and ASHA,
    the first being after `least_steps`; population-based training copies every `least_steps`. `metric` is
    what trials are compared by: auto is the evaluation's metric where there is one, else the loss.
    """

    kind: SearchKind = "grid"
    trials: int | None = None
    eta: int = 3
    least_steps: int | None = None
    metric: str = "auto"
    seed: int = 0
