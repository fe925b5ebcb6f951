"""Where the workers of a job run, and how their hosts are reached."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.schema.hosts import LOCAL, Host


@dataclass(frozen=True)
class ElasticRules:
    """How many workers a job may have while it runs, and how long one may show no sign of life.

    With fewer than `min_workers` it ends, with a checkpoint. `control` is where it takes requests for another
    number of workers.
    """

    min_workers: int = 1
    max_workers: int = 64
    heartbeat_s: float = 10.0
    control: str = "127.0.0.1:0"


@dataclass(frozen=True)
class Placement:
    """Where workers run and how their hosts are reached."""

    hosts: tuple[Host, ...] = (Host(LOCAL, 1),)
    shell: str = "ssh {host}"
    python: str = sys.executable
    nic: str | None = None
    threads: int | None = None
    timeout_s: float = 300.0
    link_timeout_s: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    # How many workers each host may hold, where a job starts with fewer than its slots.
    capacity: tuple[int, ...] = ()
    # Where workers may come and go.
    elastic: ElasticRules | None = None

    @property
    def workers(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def longest_silence_s(self) -> float:
        """How long a worker may show no sign of life."""
        return self.timeout_s if self.elastic is None else self.elastic.heartbeat_s
