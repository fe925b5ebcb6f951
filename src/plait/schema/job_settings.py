"""A job as a value: the settings of its training, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from plait.core.errors import JobError
from plait.core.yaml_text import dump_yaml
from plait.schema.hosts import LOCAL, MOST_SLOTS, Host, parse_hosts
from plait.schema.limits import AsGiven, NonEmpty
from plait.schema.placement import ElasticRules, HostAccess, Placement, WorkerLimits
from plait.schema.settings import (
    ClusterSettings,
    CommonSettings,
    ModelSettings,
    ParallelSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
    values_of,
)
from plait.schema.topology_spec import read_wish


@dataclass(frozen=True)
class Job(CommonSettings):
    """What a person asks for: one YAML file, or the same in Python; `make_job` and `read_job` make one.

    `content` is what was asked for, as plain values, without defaults.
    """

    model: str
    _: KW_ONLY
    model_args: Mapping[str, Any] = field(default_factory=dict)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    run_dir: NonEmpty = "runs"
    content: AsGiven = field(default_factory=dict, repr=False)

    def hosts(self) -> tuple[Host, ...]:
        """The hosts, with the workers that the job starts with."""
        if not self.cluster.hosts:
            return (Host(LOCAL, self.parallel.workers or 1),)
        hosts = parse_hosts(self.cluster.hosts, "cluster.hosts")
        left = self.parallel.workers
        if left is None or not self.parallel.elastic:
            return hosts
        if left > sum(self.slots()):
            raise JobError(
                f"parallel.workers: found {left}, but cluster.hosts hold {sum(self.slots())} at most"
            )
        started = []
        for host in hosts:
            started.append(Host(host.name, min(left, host.slots)))
            left -= started[-1].slots
        return tuple(started)

    def slots(self) -> tuple[int, ...]:
        """How many workers each host may hold; nothing where the job names no hosts."""
        return tuple(host.slots for host in parse_hosts(self.cluster.hosts, "cluster.hosts"))

    def elastic_rules(self) -> ElasticRules:
        """The rules of workers that come and go; no more of them than slots, or samples in a batch.

        Those of a pipeline have to find a plan, so there are no more than it starts with unless it says so.
        """
        most = sum(self.slots()) if self.cluster.hosts else MOST_SLOTS
        if self.parallel.plan != "data-parallel":
            most = self.parallel.workers or sum(self.slots()) or 1
        rules = ElasticRules(**values_of(ElasticRules, self.parallel))
        return replace(rules, max_workers=rules.max_workers or min(most, self.data.batch_size))

    def settings(self) -> TrainSettings:
        """What the workers are told."""
        parallel = self.parallel
        same = values_of(CommonSettings, self)
        return TrainSettings(
            **{**same, "model": ModelSettings(self.model, self.model_args)},
            topology=read_wish(parallel.topology),
            sync=SyncSettings(parallel.sync, parallel.sync_options),
            slow=SlowSettings(parallel.slow, parallel.jitter),
        )

    def placement(self) -> Placement:
        """Where the workers run."""
        reached, limits = values_of(HostAccess, self.cluster), values_of(WorkerLimits, self.parallel)
        return Placement(
            self.hosts(),
            self.slots() if self.cluster.hosts else (),
            self.elastic_rules() if self.parallel.elastic else None,
            **reached,
            **limits,
        )

    def text(self) -> str:
        """The job as a job file, with what was set over it."""
        return dump_yaml(self.content)
