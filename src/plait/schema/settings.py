"""What a training run is told, as plain values: read once at the edge, sent to every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.schema.topology_spec import TopologySpec

Precision = Literal["float32", "float64", "bf16", "fp16"]
# Whether what a run built is compared with the plain model first: never, once, or at every start.
Verify = Literal["off", "first", "every_run"]


@dataclass(frozen=True)
class ModelSettings:
    """The factory of the model, as `package.module:name`, and its arguments."""

    factory: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSettings:
    """The data set and how batches are drawn from it; `batch_size` counts samples over all workers.

    `collate_fn` names, as `package.module:function`, what makes a batch of a list of samples.
    """

    kind: str
    batch_size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    last_batch: Literal["keep", "drop"] = "keep"
    loaders: int = 0
    collate_fn: str | None = None


@dataclass(frozen=True)
class GroupSettings:
    """Parameters, by patterns that their names match, that have options of their own."""

    match: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerSettings:
    """`kind` is any optimizer of torch.optim in lower case, or `package.module:name`.

    A parameter has the options of the first of `groups` that its name matches put over the others.
    """

    kind: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[GroupSettings, ...] = ()


@dataclass(frozen=True)
class LrScheduleSettings:
    """How the learning rate changes: a factor on the optimizer's, as a function of the step."""

    kind: str = "constant"
    warmup_steps: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateSettings:
    """When to evaluate on the test split, and by which metric beside the loss."""

    every_steps: int | None = None
    metric: str = "auto"
    batch_size: int | None = None


@dataclass(frozen=True)
class EarlyStopSettings:
    """End when `metric` has not improved by `min_change` for `patience` evaluations."""

    patience: int
    metric: str = "loss"
    min_change: float = 0.0


@dataclass(frozen=True)
class CheckpointSettings:
    """When to write checkpoints and which to keep; `keep_best` names the metric of the best one."""

    every_steps: int = 1000
    keep_last: int = 2
    keep_best: str | None = None


@dataclass(frozen=True)
class PipelineSettings:
    """A plan to run, as its file holds it, and what a run may choose besides.

    `depths` overrides how many microbatches a stage keeps in flight; `recompute` names stages that run
    forward again instead of keeping activations, beside those that the plan asks for.
    """

    plan: Mapping[str, Any]
    vertical_sync: bool = False
    depths: Mapping[int, int] = field(default_factory=dict)
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True)
class SyncSettings:
    """How workers that hold the same model agree: a kind of sync, or `auto`, and its options."""

    kind: str = "all-reduce"
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
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainSettings:
    """One training run; without `pipeline` every worker holds the whole model."""

    name: str
    model: ModelSettings
    data: DataSettings
    loss: str = "cross-entropy"
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    lr_schedule: LrScheduleSettings = field(default_factory=LrScheduleSettings)
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    precision: Precision = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    clip_norm: float | None = None
    accumulate: int = 1
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    early_stop: EarlyStopSettings | None = None
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    tensorboard: bool = False
    log_every_steps: int | None = None
    stop_on_nan: bool = True
    pipeline: PipelineSettings | None = None
    topology: TopologySpec = field(default_factory=TopologySpec)
    sync: SyncSettings = field(default_factory=SyncSettings)
    slow: SlowSettings = field(default_factory=SlowSettings)
    verify: Verify = "first"
    monitor: tuple[str, ...] = ()
    adapt: tuple[PolicySettings, ...] = ()
