"""Where the workers of a job run, and how their hosts are reached."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from plait.schema.hosts import LOCAL, MAX_SLOTS, Host
from plait.schema.limits import CountFromZero, KeyLimits, NonEmpty, Seconds, Variables, Workers

# Who starts a job's agents: this machine, a shell on each host, or the scheduler of a cluster.
Engine = Literal["local", "ssh", "slurm", "ray"]


@dataclass(frozen=True, kw_only=True)
class HostAccess:
    """Who provides the hosts and how they are reached.

    `on` defaults to ssh for a job that lists hosts. `nodes` is the number of hosts, `2`, or the fewest and
    the most, `1:4`; `slots` the workers on each. `options` are the engine's own. After the loss of a host the
    run is started again from its newest checkpoint, at most `restarts` times without progress. The variables
    that match a pattern of `forward` are passed to the workers. Before its time is over, an engine gives the
    job `grace_s` to write a checkpoint. `python` defaults to the interpreter that starts the job.
    """

    on: Engine | None = None
    nodes: Annotated[str, KeyLimits(pattern=r"^[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?$")] | None = None
    slots: Workers | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    restarts: CountFromZero = 3
    forward: tuple[NonEmpty, ...] = ()
    grace_s: Seconds = 60.0
    shell: Annotated[str, KeyLimits(pattern=r"^[^{}]*\{host\}[^{}]*$")] = "ssh {host}"
    nic: str | None = None
    python: str | None = None
    link_timeout_s: Seconds = 8.0
    environment: Variables = field(default_factory=dict)

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """The threads of a worker, and the timeout of a collective operation."""

    threads: Annotated[int, KeyLimits(ge=1, le=4096)] | None = None
    timeout_s: Seconds = 300.0


@dataclass(frozen=True)
class ElasticRules:
    """The limits of an elastic job: its number of workers, and the heartbeat timeout of each.

    With fewer than `min_workers` it writes a checkpoint and ends. `control` is the address at which it
    accepts requests to resize.
    """

    min_workers: Workers = 1
    max_workers: Workers | None = None
    heartbeat_s: Seconds = 10.0
    control: Annotated[str, KeyLimits(pattern=r"^[^\s:/@]+:[0-9]{1,5}$")] = "127.0.0.1:0"

    @property
    def max_allowed(self) -> int:
        """The largest number of workers."""
        return self.max_workers or MAX_SLOTS


@dataclass(frozen=True)
class Placement(HostAccess, WorkerLimits):
    """Where workers run and how their hosts are reached.

    `capacity` is the number of workers that each host may run, for a job that starts with fewer than its
    slots; `elastic` is None for a job with a fixed number of workers. With a `lease_s` the loss of a worker
    does not end it: the others continue. A worker that has sent no heartbeat for that long is killed.
    """

    hosts: tuple[Host, ...] = (Host(LOCAL, 1),)
    capacity: tuple[int, ...] = ()
    elastic: ElasticRules | None = None
    lease_s: Seconds | None = None

    @property
    def workers(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def may_get_hosts(self) -> bool:
        """Whether hosts may come that the job does not have yet."""
        return self.elastic is not None and self.nodes is not None and ":" in self.nodes

    @property
    def heartbeat_timeout_s(self) -> float:
        """The longest time between two heartbeats of a worker."""
        return self.timeout_s if self.elastic is None else self.elastic.heartbeat_s
