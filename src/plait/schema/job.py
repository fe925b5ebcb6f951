"""The job file: read once, checked whole, turned into plain settings.

Every mistake is answered with the key's path, what was found, what was expected and the nearest valid name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from plait.core.errors import JobError
from plait.core.files import read_text
from plait.core.names import did_you_mean
from plait.core.plain_values import plain_copy
from plait.core.shown import shortened, shown
from plait.core.yaml_text import MOST_LEVELS, YamlError, dump_yaml, load_yaml
from plait.schema import settings as run
from plait.schema.hosts import LOCAL, MOST_SLOTS, Host, parse_hosts
from plait.schema.messages import explain
from plait.schema.placement import Placement
from plait.schema.sync_options import TOLERANT, read_options
from plait.schema.topology_spec import DEFAULT, check_wish, read_wish

# A job file is a page or two of text.
MOST_BYTES = 1_000_000
# Whole numbers up to here survive every way that steps and samples are counted.
MOST = 1 << 53
# A week and a half; what waits for messages counts milliseconds in 32 bits.
LONGEST_S = 1e6
# Microbatches that a stage keeps in flight: more than fit anywhere.
MOST_DEPTH = 1 << 16

# `a.b=c` as on the command line, or a key with its value.
Overrides = Sequence[str | tuple[str, Any]]


def _no_nul(text: str) -> str:
    """Names of files, hosts and variables end at a NUL."""
    if "\0" in text:
        raise PydanticCustomError("nul", "text without NUL characters")
    return text


def _variables(environment: dict[str, str]) -> dict[str, str]:
    for name in environment:
        if not name or "=" in name:
            raise PydanticCustomError("variable", "names of variables, without '='")
    return environment


Text = Annotated[str, AfterValidator(_no_nul)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Stage = Annotated[int, Field(ge=0, le=MOST_SLOTS)]


class Section(BaseModel):
    """A part of the job file: unknown keys and values of another type are mistakes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class OpenSection(Section):
    """A section whose further keys are options of what its `kind` names."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Data(OpenSection):
    """`data`: the data set, and how batches are drawn from it."""

    kind: Text
    batch_size: Count
    shuffle: bool = True
    last_batch: Literal["keep", "drop"] = "keep"
    loaders: int = Field(default=0, ge=0, le=1024)
    collate_fn: Text | None = None


class GroupSection(OpenSection):
    """An entry of `optimizer.groups`: which parameters, and the options that they have of their own."""

    match: Text = Field(min_length=1)


class Optimizer(OpenSection):
    """`optimizer`: any of torch.optim in lower case, or a user's own."""

    kind: Text = "sgd"
    groups: list[GroupSection] = Field(default_factory=list)


class LrSchedule(OpenSection):
    """`lr_schedule`: how the learning rate changes over the run."""

    kind: Text = "constant"
    warmup_steps: int = Field(default=0, ge=0, le=MOST)


class EvaluateSection(Section):
    """`evaluate`: when, and by which metric beside the loss."""

    every_steps: Count | None = None
    metric: Text = "auto"
    batch_size: Count | None = None


class EarlyStop(Section):
    """`early_stop`: when to give up."""

    patience: Count
    metric: Text = "loss"
    min_change: float = Field(default=0.0, ge=0)


class CheckpointSection(Section):
    """`checkpoint`: when to write one and which to keep."""

    every_steps: Count = 1000
    keep_last: Count = 2
    keep_best: Text | None = None


class Parallel(Section):
    """`parallel`: how many workers and how they share the work."""

    workers: int | None = Field(default=None, ge=1, le=MOST_SLOTS)
    plan: Text = "data-parallel"
    schedule: Literal["stash", "2bw", "flush", "gpipe", "interleaved", "zero-bubble", "none"] | None = None
    microbatches: Count | None = None
    vertical_sync: bool = False
    depths: dict[Stage, Annotated[int, Field(ge=1, le=MOST_DEPTH)]] = Field(default_factory=dict)
    recompute: list[Stage] = Field(default_factory=list)
    sync: Literal[
        "all-reduce",
        "partial-reduce",
        "ad-psgd",
        "pair-sync",
        "pair-averaging",
        "sma",
        "local-sgd",
        "hetpipe",
        "auto",
    ] = "all-reduce"
    sync_options: dict[str, Any] = Field(default_factory=dict)
    slow: dict[int, float] = Field(default_factory=dict)
    jitter: list[float] | None = Field(default=None, min_length=2, max_length=2)
    topology: Text = DEFAULT
    threads: int | None = Field(default=None, ge=1, le=4096)
    timeout_s: Seconds = 300.0


class ClusterSection(Section):
    """`cluster`: the hosts and how they are reached."""

    hosts: list[Text] = Field(default_factory=list)
    shell: Text = Field(default="ssh {host}", pattern=r"^[^{}]*\{host\}[^{}]*$")
    nic: Text | None = None
    python: Text | None = None
    link_timeout_s: Seconds = 10.0
    environment: Annotated[dict[Text, Text], AfterValidator(_variables)] = Field(default_factory=dict)


class Job(Section):
    """What a person asks for: one YAML file, or the same in Python."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    model: Text
    model_args: dict[str, Any] = Field(default_factory=dict)
    data: Data
    loss: Text = "cross-entropy"
    loss_args: dict[str, Any] = Field(default_factory=dict)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_schedule: LrSchedule = Field(default_factory=LrSchedule)
    epochs: int | None = Field(default=None, ge=1, le=1 << 31)
    steps: Count | None = None
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    precision: run.Precision = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    clip_norm: float | None = Field(default=None, gt=0)
    accumulate: Count = 1
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    early_stop: EarlyStop | None = None
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tensorboard: bool = False
    log_every_steps: Count | None = None
    stop_on_nan: bool = True
    verify: run.Verify = "first"
    parallel: Parallel = Field(default_factory=Parallel)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    run_dir: Text = Field(default="runs", min_length=1)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            found = "neither" if self.epochs is None else f"epochs: {self.epochs} and steps: {self.steps}"
            raise JobError(f"epochs: found {found}, expected one of epochs and steps")
        slots = sum(host.slots for host in self.hosts())
        if self.cluster.hosts and self.parallel.workers not in (None, slots):
            raise JobError(
                f"parallel.workers: found {self.parallel.workers}, but cluster.hosts hold {slots}; "
                f"make them equal or leave one out"
            )
        # In one chain of stages every worker sees every sample.
        if self.data.batch_size < slots and self.parallel.plan != "model-parallel":
            raise JobError(
                f"data.batch_size: found {self.data.batch_size} for {slots} workers; "
                f"expected at least one sample a worker: a batch of {slots} or more, or fewer workers"
            )
        _check_numbers(self.optimizer.options, "optimizer")
        for number, group in enumerate(self.optimizer.groups):
            _check_numbers(group.options, f"optimizer.groups[{number}]")
        _check_numbers(self.lr_schedule.options, "lr_schedule")
        _check_numbers(self.parallel.sync_options, "parallel.sync_options")
        self._check_plan()
        self._check_sync(slots)
        self._check_topology(slots)
        if self.early_stop is not None and self.evaluate.every_steps is None:
            raise JobError("early_stop: needs evaluations to judge by; add evaluate.every_steps")
        return self

    def _check_plan(self) -> None:
        parallel = self.parallel
        names = ["data-parallel", "model-parallel", "auto"]
        if parallel.plan not in names and not parallel.plan.endswith(".json"):
            raise JobError(
                f"parallel.plan: found {shown(parallel.plan)}, expected auto, data-parallel, model-parallel "
                f"or a plan file (.json){did_you_mean(parallel.plan, names)}"
            )
        set_over = {"schedule", "microbatches", "vertical_sync", "depths", "recompute"}
        if parallel.plan == "data-parallel" and (extra := set_over & parallel.model_fields_set):
            raise JobError(
                f"parallel.{min(extra)}: belongs to a pipeline, but parallel.plan is data-parallel; "
                f"use plan: auto, or a plan file"
            )

    def _check_sync(self, workers: int) -> None:
        parallel = self.parallel
        if parallel.sync == "auto" and parallel.sync_options:
            raise JobError(
                "parallel.sync_options: found options, but parallel.sync is auto; name the sync they are for"
            )
        if parallel.sync != "auto":
            # How many pipelines a plan has side by side is known once there is one.
            most = workers if parallel.plan == "data-parallel" else MOST_SLOTS
            read_options(parallel.sync, parallel.sync_options, most)
        if parallel.sync_options.get("average") == "gradients" and self.precision == "fp16":
            raise JobError(
                "parallel.sync_options.average: found 'gradients' with precision fp16, which scales them "
                "differently on each worker; use bf16 or float32, or average: weights"
            )
        if parallel.plan != "data-parallel" and parallel.sync not in ("all-reduce", *TOLERANT):
            raise JobError(
                f"parallel.sync: found {parallel.sync!r} with parallel.plan {shown(parallel.plan)}; "
                f"pipelines agree by all-reduce or, side by side, by {', '.join(TOLERANT)}"
            )
        if parallel.plan == "data-parallel" or workers > 1:
            check_slow(parallel.slow, workers)
        if parallel.jitter is not None and not (
            0 <= parallel.jitter[0] <= 1 and 0 <= parallel.jitter[1] <= LONGEST_S
        ):
            raise JobError(
                f"parallel.jitter: found {parallel.jitter}, expected a probability from 0 to 1 and "
                f"seconds, such as [0.1, 0.5]"
            )

    def _check_topology(self, workers: int) -> None:
        parallel = self.parallel
        wish = read_wish(parallel.topology)
        if "topology" in parallel.model_fields_set and parallel.sync != "all-reduce":
            raise JobError(
                f"parallel.topology: belongs to an all-reduce, but parallel.sync is {parallel.sync!r}; "
                f"leave it out, or use sync: all-reduce"
            )
        if not wish.by_name and parallel.plan != "data-parallel":
            raise JobError(
                f"parallel.topology: found {shown(wish.name)} with parallel.plan {shown(parallel.plan)}; the "
                f"replicas of each stage need a topology of their own: use a name, or plan: data-parallel"
            )
        check_wish(wish, workers)

    def hosts(self) -> tuple[Host, ...]:
        if self.cluster.hosts:
            return parse_hosts(self.cluster.hosts, "cluster.hosts")
        return (Host(LOCAL, self.parallel.workers or 1),)

    def settings(self) -> run.TrainSettings:
        """What the workers are told."""
        return run.TrainSettings(
            name=self.name,
            model=run.ModelSettings(self.model, self.model_args),
            data=run.DataSettings(
                self.data.kind,
                self.data.batch_size,
                self.data.options,
                self.data.shuffle,
                self.data.last_batch,
                self.data.loaders,
                self.data.collate_fn,
            ),
            loss=self.loss,
            loss_args=self.loss_args,
            optimizer=run.OptimizerSettings(
                self.optimizer.kind,
                self.optimizer.options,
                tuple(run.GroupSettings(group.match, group.options) for group in self.optimizer.groups),
            ),
            lr_schedule=run.LrScheduleSettings(
                self.lr_schedule.kind, self.lr_schedule.warmup_steps, self.lr_schedule.options
            ),
            epochs=self.epochs,
            steps=self.steps,
            seed=self.seed,
            precision=self.precision,
            device=self.device,
            clip_norm=self.clip_norm,
            accumulate=self.accumulate,
            evaluate=run.EvaluateSettings(**self.evaluate.model_dump()),
            early_stop=run.EarlyStopSettings(**self.early_stop.model_dump()) if self.early_stop else None,
            checkpoint=run.CheckpointSettings(**self.checkpoint.model_dump()),
            tensorboard=self.tensorboard,
            log_every_steps=self.log_every_steps,
            stop_on_nan=self.stop_on_nan,
            verify=self.verify,
            topology=read_wish(self.parallel.topology),
            sync=run.SyncSettings(self.parallel.sync, self.parallel.sync_options),
            slow=run.SlowSettings(self.parallel.slow, _pair(self.parallel.jitter)),
        )

    def placement(self) -> Placement:
        """Where the workers run."""
        return Placement(
            hosts=self.hosts(),
            shell=self.cluster.shell,
            python=self.cluster.python or sys.executable,
            nic=self.cluster.nic,
            threads=self.parallel.threads,
            timeout_s=self.parallel.timeout_s,
            link_timeout_s=self.cluster.link_timeout_s,
            environment=self.cluster.environment,
        )

    def text(self) -> str:
        """The job as a job file, with what was set over it."""
        return dump_yaml(self.model_dump(exclude_unset=True))


def check_slow(slow: Mapping[int, float], workers: int) -> None:
    """Refuse to slow a worker that is not there, or to make one faster."""
    for rank, factor in slow.items():
        if not (0 <= rank < workers and 1 <= factor <= LONGEST_S):
            raise JobError(
                f"parallel.slow: found {shown(rank)}: {factor}, expected a worker from 0 to {workers - 1} "
                f"and how many times slower it is, at least 1, such as {{1: 4}}"
            )


def _check_numbers(value: Any, path: str) -> None:
    """Refuse numbers in `value` that no optimizer, schedule or sync can count with."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        _check_numbers(each, f"{path}.{shortened(str(key))}")
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(f"{path}: found {value}, expected a finite number")
    if isinstance(value, int) and abs(value) > MOST:
        raise JobError(f"{path}: found {shown(value)}, expected a whole number up to 2**53")


def _pair(numbers: Sequence[float] | None) -> tuple[float, float] | None:
    return (numbers[0], numbers[1]) if numbers is not None else None


def read_job(path: str | Path, overrides: Overrides = ()) -> Job:
    """The job in the file `path` with overrides put over it: `a.b=c`, or a key and its value."""
    text = read_text(Path(path), "a job file (YAML)", MOST_BYTES, JobError)
    content = parse(text, str(path))
    if isinstance(kind := content.get("plait"), str):
        raise JobError(f"{path}: this is a {shortened(kind)} file, expected a job file (YAML)")
    return make_job(content, overrides)


def as_job(job: Job | str | Path | Mapping[str, Any]) -> Job:
    """A job that was given as such, as the path of its file, or as plain values."""
    if isinstance(job, Job):
        return job
    return read_job(job) if isinstance(job, (str, Path)) else make_job(job)


def make_job(content: Mapping[str, Any], overrides: Overrides = ()) -> Job:
    """A checked job from plain values, as a job file holds them."""
    if not isinstance(content, Mapping):
        raise JobError(f"found {shown(content)}, expected keys such as name, model and data; see read_job")
    tree = plain_copy(content)
    for override in overrides:
        _put(tree, override)
    try:
        return Job.model_validate(tree)
    except ValidationError as failure:
        raise JobError(explain(Job, failure)) from None


def parse(text: str, where: str) -> dict[str, Any]:
    """The mapping that a job file holds; `where` names the file in messages."""
    try:
        content = load_yaml(text)
    except YamlError as failure:
        line = "" if failure.line is None else f":{failure.line}"
        raise JobError(f"{where}{line}: {failure}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise JobError(f"{where}: found {found}, expected keys such as name, model and data")
    return content


def _put(tree: dict[str, Any], override: str | tuple[str, Any]) -> None:
    path, value = _parse_override(override) if isinstance(override, str) else override
    shown_path = shortened(path)
    *parents, last = path.split(".")
    if not all((*parents, last)):
        raise JobError(f"--set: found {shown(path)}, expected a key of the job, such as optimizer.lr")
    if len(parents) > MOST_LEVELS:
        raise JobError(f"--set {shown_path}: found {len(parents) + 1:,} levels, expected a key of the job")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        below = tree[parent]
        if not isinstance(below, dict):
            raise JobError(
                f"--set {shown_path}: {shown(parent)} holds {shown(below)}, so it has no key {shown(last)}"
            )
        tree = below
    tree[last] = plain_copy(value, path)


def _parse_override(override: str) -> tuple[str, Any]:
    path, equals, text = override.partition("=")
    if not equals:
        raise JobError(f"--set: found {shown(override)}, expected key.path=value, such as optimizer.lr=0.1")
    try:
        return path, load_yaml(text)
    except YamlError as failure:
        raise JobError(
            f"--set {shortened(path)}: found {shown(text)}, expected a YAML value ({failure})"
        ) from None
