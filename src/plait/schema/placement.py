"""Where the workers of a job run, and how their hosts are reached."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated

from plait.schema.hosts import LOCAL, MOST_SLOTS, Host
from plait.schema.limits import KeyLimits, Seconds, Variables, Workers


@dataclass(frozen=True, kw_only=True)
class HostAccess:
    """How hosts are reached; without `python`, workers run the interpreter that starts them."""

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
    """How many threads a worker has, and how long a collective operation may take."""

    threads: Annotated[int, KeyLimits(ge=1, le=4096)] | None = None
    timeout_s: Seconds = 300.0


@dataclass(frozen=True)
class ElasticRules:
    """How many workers a job may have while it runs, and how long one may show no sign of life.

    With fewer than `min_workers` it ends, with a checkpoint. `control` is where it takes requests for another
    number of workers.
    """

    min_workers: Workers = 1
    max_workers: Workers | None = None
    heartbeat_s: Seconds = 10.0
    control: Annotated[str, KeyLimits(pattern=r"^[^\s:/@]+:[0-9]{1,5}$")] = "127.0.0.1:0"

    @property
    def most(self) -> int:
        """The most workers there may be."""
        return self.max_workers or MOST_SLOTS


@dataclass(frozen=True)
class Placement(HostAccess, WorkerLimits):
    """Where workers run and how their hosts are reached.

    `capacity` is how many workers each host may hold, where a job starts with fewer than its slots; `elastic`
    are the rules of workers that come and go.
    """

    hosts: tuple[Host, ...] = (Host(LOCAL, 1),)
    capacity: tuple[int, ...] = ()
    elastic: ElasticRules | None = None

    @property
    def workers(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def longest_silence_s(self) -> float:
        """How long a worker may show no sign of life."""
        return self.timeout_s if self.elastic is None else self.elastic.heartbeat_s
