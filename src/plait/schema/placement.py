"""Where the workers of a job run, and how their hosts are reached."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated

from plait.schema.hosts import LOCAL, Host
from plait.schema.limits import KeyLimits, Seconds, Variables


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
class Placement(HostAccess, WorkerLimits):
    """Where workers run and how their hosts are reached."""

    hosts: tuple[Host, ...] = (Host(LOCAL, 1),)

    @property
    def workers(self) -> int:
        return sum(host.slots for host in self.hosts)
