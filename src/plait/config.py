"""The job file: read once, checked whole, turned into the rooms' plain settings.

Every mistake is answered with the key's path, what was found, what was expected and the nearest valid name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plait.cluster.hosts import LOCAL, Host, parse_hosts
from plait.core.errors import JobError
from plait.core.names import did_you_mean
from plait.runtime import settings as run
from plait.runtime.launch import Placement
from plait.sync.options import TOLERANT, read_options
from plait.sync.wish import AUTO, DEFAULT, find_topology, read_wish

# More than there are anywhere.
MOST_WORKERS = 1 << 20
# What keys with a form of their own look like, in words.
FORMS = {
    "name": "letters, digits, '.', '_' and '-', as in a folder's name",
    "cluster.shell": "a command with {host} in it, such as 'ssh {host}'",
}


class Section(BaseModel):
    """A part of the job file: unknown keys and values of another type are mistakes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OpenSection(Section):
    """A section whose further keys are options of what its `kind` names."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Data(OpenSection):
    """`data`: the data set, and how batches are drawn from it."""

    kind: str
    batch_size: int = Field(ge=1)
    shuffle: bool = True
    last_batch: Literal["keep", "drop"] = "keep"
    loaders: int = Field(default=0, ge=0)
    collate_fn: str | None = None


class Optimizer(OpenSection):
    """`optimizer`: any of torch.optim in lower case, or a user's own."""

    kind: str = "sgd"


class LrSchedule(OpenSection):
    """`lr_schedule`: how the learning rate changes over the run."""

    kind: str = "constant"
    warmup_steps: int = Field(default=0, ge=0)


class Evaluate(Section):
    """`evaluate`: when, and by which metric beside the loss."""

    every_steps: int | None = Field(default=None, ge=1)
    metric: str = "auto"
    batch_size: int | None = Field(default=None, ge=1)


class EarlyStop(Section):
    """`early_stop`: when to give up."""

    patience: int = Field(ge=1)
    metric: str = "loss"
    min_change: float = Field(default=0.0, ge=0)


class Checkpoint(Section):
    """`checkpoint`: when to write one and which to keep."""

    every_steps: int = Field(default=1000, ge=1)
    keep_last: int = Field(default=2, ge=1)
    keep_best: str | None = None


class Parallel(Section):
    """`parallel`: how many workers and how they share the work."""

    workers: int | None = Field(default=None, ge=1)
    plan: str = "data-parallel"
    schedule: Literal["stash", "2bw", "flush", "gpipe", "interleaved", "zero-bubble", "none"] | None = None
    microbatches: int | None = Field(default=None, ge=1)
    vertical_sync: bool = False
    depths: dict[int, int] = Field(default_factory=dict)
    recompute: list[int] = Field(default_factory=list)
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
    topology: str = DEFAULT
    threads: int | None = Field(default=None, ge=1)
    timeout_s: float = Field(default=300.0, gt=0)


class Cluster(Section):
    """`cluster`: the hosts and how they are reached."""

    hosts: list[str] = Field(default_factory=list)
    shell: str = Field(default="ssh {host}", pattern=r"^[^{}]*\{host\}[^{}]*$")
    nic: str | None = None
    python: str | None = None
    link_timeout_s: float = Field(default=10.0, gt=0)
    environment: dict[str, str] = Field(default_factory=dict)


class Job(Section):
    """What a person asks for: one YAML file, or the same in Python."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: str
    model_args: dict[str, Any] = Field(default_factory=dict)
    data: Data
    loss: str = "cross-entropy"
    loss_args: dict[str, Any] = Field(default_factory=dict)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_schedule: LrSchedule = Field(default_factory=LrSchedule)
    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    precision: run.Precision = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    clip_norm: float | None = Field(default=None, gt=0)
    accumulate: int = Field(default=1, ge=1)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    early_stop: EarlyStop | None = None
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    tensorboard: bool = False
    log_every_steps: int | None = Field(default=None, ge=1)
    parallel: Parallel = Field(default_factory=Parallel)
    cluster: Cluster = Field(default_factory=Cluster)
    run_dir: str = "runs"

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
        if self.data.batch_size < slots:
            raise JobError(
                f"data.batch_size: found {self.data.batch_size} for {slots} workers; "
                f"expected at least one sample a worker: a batch of {slots} or more, or fewer workers"
            )
        self._check_plan()
        self._check_sync(slots)
        self._check_topology()
        if self.early_stop is not None and self.evaluate.every_steps is None:
            raise JobError("early_stop: needs evaluations to judge by; add evaluate.every_steps")
        return self

    def _check_plan(self) -> None:
        parallel = self.parallel
        names = ["data-parallel", "model-parallel", "auto"]
        if parallel.plan not in names and not parallel.plan.endswith(".json"):
            raise JobError(
                f"parallel.plan: found {parallel.plan!r}, expected auto, data-parallel, model-parallel or a "
                f"plan file (.json){did_you_mean(parallel.plan, names)}"
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
            most = workers if parallel.plan == "data-parallel" else MOST_WORKERS
            read_options(parallel.sync, parallel.sync_options, most)
        if parallel.sync_options.get("average") == "gradients" and self.precision == "fp16":
            raise JobError(
                "parallel.sync_options.average: found 'gradients' with precision fp16, which scales them "
                "differently on each worker; use bf16 or float32, or average: weights"
            )
        if parallel.plan != "data-parallel" and parallel.sync not in ("all-reduce", *TOLERANT):
            raise JobError(
                f"parallel.sync: found {parallel.sync!r} with parallel.plan {parallel.plan!r}; pipelines "
                f"agree by all-reduce or, side by side, by {', '.join(TOLERANT)}"
            )
        if parallel.plan == "data-parallel" or workers > 1:
            check_slow(parallel.slow, workers)
        if parallel.jitter is not None and not (0 <= parallel.jitter[0] <= 1 and parallel.jitter[1] >= 0):
            raise JobError(
                f"parallel.jitter: found {parallel.jitter}, expected a probability from 0 to 1 and "
                f"seconds, such as [0.1, 0.5]"
            )

    def _check_topology(self) -> None:
        parallel = self.parallel
        wish = read_wish(parallel.topology)
        if "topology" in parallel.model_fields_set and parallel.sync != "all-reduce":
            raise JobError(
                f"parallel.topology: belongs to an all-reduce, but parallel.sync is {parallel.sync!r}; "
                f"leave it out, or use sync: all-reduce"
            )
        if not wish.by_name and parallel.plan != "data-parallel":
            raise JobError(
                f"parallel.topology: found {wish.name!r} with parallel.plan {parallel.plan!r}; the replicas "
                f"of each stage need a topology of their own: use a name, or plan: data-parallel"
            )
        if (wish.by_name or wish.graphs) and wish.name != AUTO:
            find_topology(wish, [host.name for host in self.hosts() for _ in range(host.slots)])

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
            optimizer=run.OptimizerSettings(self.optimizer.kind, self.optimizer.options),
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
            tolerate_loss=self.parallel.sync in (*TOLERANT, "auto"),
        )

    def text(self) -> str:
        """The job as a job file, with what was set over it."""
        return yaml.safe_dump(self.model_dump(exclude_unset=True), sort_keys=False)


def check_slow(slow: Mapping[int, float], workers: int) -> None:
    """Refuse to slow a worker that is not there, or to make one faster."""
    for rank, factor in slow.items():
        if not 0 <= rank < workers or factor < 1:
            raise JobError(
                f"parallel.slow: found {rank}: {factor}, expected a worker from 0 to {workers - 1} and "
                f"how many times slower it is, at least 1, such as {{1: 4}}"
            )


def _pair(numbers: Sequence[float] | None) -> tuple[float, float] | None:
    return (numbers[0], numbers[1]) if numbers is not None else None


def read_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job in `path` with `a.b=c` overrides put over it."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise JobError(f"{path}: no such file; expected a job file (YAML)") from None
    except (OSError, UnicodeDecodeError) as failure:
        raise JobError(f"{path}: cannot be read: {failure}") from None
    content = parse(text, str(path))
    if isinstance(kind := content.get("plait"), str):
        raise JobError(f"{path}: this is a {kind} file, expected a job file (YAML)")
    return make_job(content, overrides)


def make_job(content: Mapping[str, Any], overrides: Sequence[str] = ()) -> Job:
    """A checked job from plain values, as a job file holds them."""
    tree = _copy(content)
    for override in overrides:
        _put(tree, override)
    try:
        return Job.model_validate(tree)
    except ValidationError as failure:
        raise JobError("\n".join(_explain(error) for error in failure.errors())) from None


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, and a key given twice is a mistake."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise JobError(f"{key}: given twice (line {node.start_mark.line + 1} and on); give it once")
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str, where: str) -> dict[str, Any]:
    """The mapping that a job file holds; `where` names the file in messages."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as failure:
        line = failure.problem_mark.line + 1 if failure.problem_mark else 0
        raise JobError(f"{where}:{line}: not YAML: {failure.problem}") from None
    except yaml.YAMLError as failure:
        raise JobError(f"{where}: not YAML: {failure}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise JobError(f"{where}: found {found}, expected keys such as name, model and data")
    return content


def _copy(tree: Any) -> Any:
    return {key: _copy(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _put(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not all(path.split(".")):
        raise JobError(f"--set: found {override!r}, expected key.path=value, such as optimizer.lr=0.1")
    *parents, last = path.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if not isinstance(below, dict):
            raise JobError(f"--set {path}: {parent!r} holds {below!r}, so it has no key {last!r}")
        tree = below
    try:
        tree[last] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise JobError(f"--set {path}: found {text!r}, expected a YAML value") from None


def _explain(error: Any) -> str:
    """One pydantic error in our words: path, found, expected, nearest valid name."""
    location = [str(part) for part in error["loc"]]
    path, kind, found = ".".join(location), error["type"], error["input"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{path}: unknown key{did_you_mean(location[-1], _keys_at(location[:-1]))}"
    if kind == "missing":
        return f"{path}: missing; expected {_expected_at(location)}"
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        hint = did_you_mean(str(found), valid)
        return f"{path}: found {found!r}, expected {' or '.join(valid)}{hint if 'mean' in hint else ''}"
    if kind == "string_pattern_mismatch":
        return f"{path}: found {found!r}, expected {FORMS[path]}"
    words = error["msg"].removeprefix("Input should be ").removeprefix("String should ")
    return f"{path}: found {found!r}, expected {words}"


def _section_at(location: Sequence[str]) -> type[BaseModel] | None:
    section: type[BaseModel] = Job
    for part in location:
        field = section.model_fields.get(part)
        kinds = [k for k in _kinds(field.annotation) if issubclass(k, BaseModel)] if field else []
        if not kinds:
            return None
        section = kinds[0]
    return section


def _kinds(annotation: Any) -> list[type]:
    arguments = getattr(annotation, "__args__", None)
    kinds = list(arguments) if arguments else [annotation]
    return [kind for kind in kinds if isinstance(kind, type)]


def _keys_at(location: Sequence[str]) -> list[str]:
    section = _section_at(location)
    return list(section.model_fields) if section else []


def _expected_at(location: Sequence[str]) -> str:
    section = _section_at(location[:-1])
    field = section.model_fields.get(location[-1]) if section else None
    if field is None:
        return "a value"
    kind = _kinds(field.annotation)[0]
    if issubclass(kind, BaseModel):
        return f"a section with {', '.join(n for n, f in kind.model_fields.items() if f.is_required())}"
    return {"int": "a whole number", "str": "text", "float": "a number"}.get(kind.__name__, kind.__name__)
