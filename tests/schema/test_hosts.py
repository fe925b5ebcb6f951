"""Several hosts, for real: network namespaces joined by a bridge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.core.errors import LaunchError
from plait.schema.hosts import Host
from support.hosts import Hosts
from support.launching import Memory, launch_entry, pause_agents_then_stop

pytestmark = pytest.mark.usefixtures("forked_commands")

TWO = (Host("w0", 2), Host("w1", 2))


def test_one_job_runs_over_two_hosts_and_stops_though_its_agents_were_paused(hosts: Hosts, tmp_path: Path):
    """The pause is longer than hosts may be out of each other's reach: only their processes were."""
    hosts.make("w0", "w1")
    memory = Memory(pause_agents_then_stop(2.5, workers_too=(False,)))
    results = launch_entry(
        "work_until_stopped",
        tmp_path,
        memory,
        hosts=TWO,
        shell=hosts.shell,
        nic="eth0",
        link_timeout_s=1.0,
    )
    assert all(results[rank]["stopped"] for rank in range(4))
    assert [worker.host for worker in memory.workers] == ["w0", "w0", "w1", "w1"]
    assert "[w1 2] worker 2 starts" in memory.lines
    assert hosts.processes() == []


class CutsWhileTraining(Memory):
    """Takes a host off the network at the first report of a step: hosts that still connect wait for long."""

    def __init__(self, hosts: Hosts, host: str) -> None:
        super().__init__()
        self._hosts, self._host = hosts, host

    def progressed(self, progress: Mapping[str, Any]) -> None:
        super().progressed(progress)
        if len(self.progress) == 1:
            self._hosts.cut(self._host)


def test_a_link_that_goes_down_ends_the_job_with_a_clear_message(hosts: Hosts, tmp_path: Path):
    hosts.make("w0", "w1")
    with pytest.raises(LaunchError, match="w1 and w0 could not reach each other for 3 s"):
        launch_entry(
            "work_until_stopped",
            tmp_path,
            CutsWhileTraining(hosts, "w1"),
            hosts=TWO,
            shell=hosts.shell,
            nic="eth0",
            link_timeout_s=3.0,
        )
    assert hosts.processes() == []


def test_a_worker_that_fails_on_one_host_ends_the_workers_of_the_other(hosts: Hosts, tmp_path: Path):
    hosts.make("w0", "w1")
    with pytest.raises(LaunchError, match="worker 1 on w0 failed: ZeroDivisionError"):
        launch_entry(
            "fail", tmp_path, Memory(), settings={"how": "raise"}, hosts=TWO, shell=hosts.shell, nic="eth0"
        )
    assert hosts.processes() == []
