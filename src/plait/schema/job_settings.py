"""A job as a value: the settings of its training, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from plait.core.yaml_text import dump_yaml
from plait.schema.hosts import LOCAL, Host, parse_hosts
from plait.schema.limits import AsGiven, NonEmpty
from plait.schema.placement import HostAccess, Placement, WorkerLimits
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
        if self.cluster.hosts:
            return parse_hosts(self.cluster.hosts, "cluster.hosts")
        return (Host(LOCAL, self.parallel.workers or 1),)

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
        return Placement(self.hosts(), **reached, **limits)

    def text(self) -> str:
        """The job as a job file, with what was set over it."""
        return dump_yaml(self.content)
