"""A job as a value: the settings of its training, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

from plait.core.errors import JobError
from plait.core.yaml_text import dump_yaml
from plait.schema.hosts import LOCAL, MAX_SLOTS, Host, parse_hosts
from plait.schema.limits import AsGiven, NonEmpty, ReadFrom, TakenHosts
from plait.schema.placement import ElasticRules, Engine, HostAccess, Placement, WorkerLimits
from plait.schema.settings import (
    ClusterSettings,
    CommonSettings,
    LoraSettings,
    ModelSettings,
    ParallelSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
    values_of,
)
from plait.schema.topology_spec import TopologySpec, read_topology_spec


@dataclass(frozen=True)
class Job(CommonSettings):
    """A job as the user specifies it, in a YAML file or in Python; made by `make_job` and `read_job`.

    `content` holds the keys that were set, as plain values, without defaults; `folder` is that of the job
    file, where there is one. `taken` are the hosts that a launcher has provided; until then the fewest that
    the job can do with stand for them.

    Examples:
        ```python
        data = {"kind": "digits", "batch_size": 64}
        job = plait.make_job({"name": "d", "model": "plait.workloads.mlp:mlp", "data": data, "epochs": 1})
        job.parallel.workers  # 1
        ```
    """

    model: str
    _: KW_ONLY
    model_args: Mapping[str, Any] = field(default_factory=dict)
    lora: LoraSettings | None = None
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    run_dir: NonEmpty = "runs"
    content: AsGiven = field(default_factory=dict, repr=False)
    folder: ReadFrom = field(default=None, repr=False, compare=False)
    taken: TakenHosts = field(default=(), repr=False, compare=False)

    @cached_property
    def listed(self) -> tuple[Host, ...]:
        """The hosts of `cluster.hosts`, each with all its slots."""
        cluster = self.cluster
        return parse_hosts(cluster.hosts, "cluster.hosts", cluster.slots or 1) if cluster.hosts else ()

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the job, each with all its slots; empty if it is this one."""
        if self.taken or self.engine == "local":
            return self.taken
        fewest, _ = self.node_range
        slots = self.cluster.slots or 1
        return self.listed[:fewest] or tuple(Host(f"node{i}", slots) for i in range(fewest))

    @property
    def engine(self) -> Engine:
        """Who starts the job's agents."""
        return self.cluster.on or ("ssh" if self.cluster.hosts else "local")

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest and the most hosts: all that are listed, or any number, unless the job says it."""
        if self.cluster.nodes is None:
            return (len(self.listed), len(self.listed)) if self.listed else (1, MAX_SLOTS)
        fewest, _, most = self.cluster.nodes.partition(":")
        return int(fewest), int(most or fewest)

    def _first_hosts(self) -> tuple[Host, ...]:
        """The hosts, each with the number of workers it starts with."""
        remaining, slots = self.parallel.workers, sum(host.slots for host in self.hosts)
        if not self.hosts:
            return (Host(LOCAL, remaining or 1),)
        if remaining is None or not self.parallel.elastic:
            return self.hosts
        if remaining > slots:
            raise JobError(f"parallel.workers: found {remaining}, but the job's hosts have {slots} slots")
        started = []
        for host in self.hosts:
            started.append(replace(host, slots=min(remaining, host.slots)))
            remaining -= started[-1].slots
        return tuple(started)

    def _elastic_rules(self) -> ElasticRules:
        """The limits of an elastic job; `max_workers` defaults to the slots or the batch size, if smaller.

        A pipeline needs a plan for each number of workers, so its default is the number it starts with.
        """
        slots = sum(host.slots for host in self.hosts)
        if self.cluster.nodes is not None:  # hosts may come later
            slots = max(slots, self.node_range[1] * (self.cluster.slots or 1))
        if self.parallel.plan != "data-parallel":
            slots = self.parallel.workers or slots or 1
        rules = ElasticRules(**values_of(ElasticRules, self.parallel))
        return replace(rules, max_workers=rules.max_workers or min(slots or MAX_SLOTS, self.data.batch_size))

    @cached_property
    def topology(self) -> TopologySpec:
        """What `parallel.topology` says; its file, if it is one, is read once."""
        return read_topology_spec(self.parallel.topology)

    def settings(self) -> TrainSettings:
        """The settings that are sent to the workers."""
        parallel = self.parallel
        common = values_of(CommonSettings, self)
        return TrainSettings(
            **{**common, "model": ModelSettings(self.model, self.model_args, self.lora)},
            topology=self.topology,
            sync=SyncSettings(parallel.sync, parallel.sync_options),
            slow=SlowSettings(parallel.slow, parallel.jitter),
        )

    @cached_property
    def placement(self) -> Placement:
        """Where the workers run."""
        access, limits = values_of(HostAccess, self.cluster), values_of(WorkerLimits, self.parallel)
        return Placement(
            self._first_hosts(),
            tuple(host.slots for host in self.hosts),
            self._elastic_rules() if self.parallel.elastic else None,
            **access,
            **limits,
        )

    def text(self) -> str:
        """The job as the text of a job file, overrides applied."""
        return dump_yaml(self.content)
