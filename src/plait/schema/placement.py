"""Where the workers of a job run, and how their hosts are reached."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated

from plait.schema.hosts import LOCAL, MAX_SLOTS, Host
from plait.schema.limits import KeyLimits, Seconds, Variables, Workers


@dataclass(frozen=True, kw_only=True)
class HostAccess:
    """How hosts are reached; `python` defaults to the interpreter that starts the job."""

    shell: Annotated[str, KeyLimits(pattern=r"^[^{}]*\{host\}[^{}]*$")] = "ssh {host}"
    nic: str | None = None
    python: str | None = None
    link_timeout_s: Seconds = 10.0
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
    def heartbeat_timeout_s(self) -> float:
        """The longest time between two heartbeats of a worker."""
        return self.timeout_s if self.elastic is None else self.elastic.heartbeat_s
