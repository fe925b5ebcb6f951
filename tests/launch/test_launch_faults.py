"""What hangs, stops or dies is noticed, named and ended; nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from plait.core.errors import LaunchError
from plait.jobs.run_script import run_script
from plait.launcher.launchers import agent_stream
from plait.launcher.membership_decisions import ControlRequest
from plait.launcher.supervision import host_agents
from plait.launcher.supervision.launch_errors import Interrupted, WorkerError
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import ElasticRules
from support.further import but_further
from support.hosts import Hosts
from support.launching import Memory, agents, launch_entry, left_behind, pause_agents_then_stop

pytestmark = pytest.mark.usefixtures("forked_commands")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No process outlives a launch, and no file but its logs."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    yield
    end = time.monotonic() + 20
    while left_behind() and time.monotonic() < end:
        time.sleep(0.02)  # a look at all processes takes CPU time
    assert left_behind() == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("gloo", "sleeps"),
        pytest.param("tree", "sleeps", marks=pytest.mark.extended),
        ("tree", "stops"),
        pytest.param("nowhere", "stops", marks=pytest.mark.extended),
    ],
)
def test_a_worker_that_hangs_is_the_one_that_is_named(where: str, how: str, tmp_path: Path):
    settings = {"where": where, "how": how, "who": 2}
    with pytest.raises(WorkerError) as caught:
        launch_entry("hang", tmp_path, Memory(), settings=settings, hosts=(Host(LOCAL, 4),), timeout_s=2.0)
    assert caught.value.rank == 2
    assert str(caught.value).startswith("worker 2 on localhost failed: hangs: ")


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("sys.exit(3 if os.environ['RANK'] == '1' else 0)", 3, "worker 1 .*: its script ended with status 3"),
        ("argparse.ArgumentParser().parse_args(['--lr'])", 2, "its script ended with status 2"),
        ("sys.exit('no data')", 1, "no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "SIGKILL|workers? (is|are) left"),
    ],
)
def test_plait_run_has_the_exit_status_of_its_script(end: str, status: int, words: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(f"import argparse, os, signal, sys\n{end}\n")
    with pytest.raises(LaunchError, match=words) as caught:
        run_script(script, [], 2, None, None, "2", tmp_path / "runs", Memory())
    assert caught.value.exit_status == status


def test_a_job_that_may_lose_workers_waits_for_the_slowest_to_finish(tmp_path: Path):
    memory = Memory()
    settings = {"who": 2, "how": "kill", "longer_s": 1.5}
    results = launch_entry(
        "go_on_without", tmp_path, memory, settings=settings, hosts=(Host(LOCAL, 3),), lease_s=3.0
    )
    assert sorted(results) == [0, 1]
    assert next(line for line in memory.lines if "is lost" in line).startswith(
        "warning: worker 2 on localhost is lost (ended by SIGKILL); the rest goes on"
    )


def test_a_worker_that_shows_no_sign_of_life_is_ended_and_the_others_go_on(tmp_path: Path):
    memory = Memory()
    settings = {"who": 1, "how": "stop", "longer_s": 0.0}
    results = launch_entry(
        "go_on_without", tmp_path, memory, settings=settings, hosts=(Host(LOCAL, 3),), lease_s=2.0
    )
    assert sorted(results) == [0, 2]


@pytest.mark.parametrize(("how", "status"), [("input", 2), ("disk", 1)])
def test_what_would_end_one_worker_after_the_other_ends_all_at_once(how: str, status: int, tmp_path: Path):
    settings = {"who": 1, "how": how, "longer_s": 60.0}
    with pytest.raises(WorkerError) as caught:
        launch_entry(
            "go_on_without", tmp_path, Memory(), settings=settings, hosts=(Host(LOCAL, 3),), lease_s=3.0
        )
    assert (caught.value.rank, caught.value.exit_status) == (1, status)


# A worker that raises ends, as one that is killed does.
@pytest.mark.parametrize("how", but_further(("kill", "raise", "stop"), "raise"))
def test_with_one_worker_a_host_a_lost_one_is_left_out_too(how: str, tmp_path: Path, hosts: Hosts):
    hosts.make("w0", "w1")
    settings = {"who": 1, "how": how, "longer_s": 0.0}
    there = {"hosts": (Host("w0", 1), Host("w1", 1)), "shell": hosts.shell, "nic": "eth0"}
    results = launch_entry("go_on_without", tmp_path, Memory(), settings=settings, lease_s=3.0, **there)
    assert sorted(results) == [0]


def stop_a_worker_and_kill(what: Callable[[Memory], int]) -> Callable[[Memory], None]:
    def act(memory: Memory) -> None:
        os.kill(memory.workers[1].pid, signal.SIGSTOP)
        os.kill(what(memory), signal.SIGKILL)

    return act


def agent_of(memory: Memory) -> int:
    (agent,) = agents()
    return agent.pid


def fork_server_of(memory: Memory) -> int:
    (server,) = psutil.Process(agent_of(memory)).children()
    return server.pid


@pytest.mark.usefixtures("real_commands")
@pytest.mark.parametrize(("what", "how"), [(agent_of, " by SIGKILL"), (fork_server_of, "")])
def test_what_starts_workers_takes_them_along_even_where_one_is_stopped(what, how: str, tmp_path: Path):
    memory = Memory(stop_a_worker_and_kill(what))
    with pytest.raises(LaunchError, match=f"the agent on localhost ended{how}"):
        launch_entry("work_until_stopped", tmp_path, memory)


def test_a_host_that_reads_nothing_can_be_given_up(tmp_path: Path):
    """The order is larger than a pipe holds, and two requests to stop end the launch all the same."""
    memory = Memory()
    stops = threading.Timer(0.3, lambda: (memory.supervisor.request_stop(), memory.supervisor.request_stop()))
    stops.start()
    with pytest.raises(Interrupted):
        launch_entry(
            "add_ranks",
            tmp_path,
            memory,
            settings={"much": "x" * 1_000_000},
            hosts=(Host("nowhere", 1),),
            shell="sh -c 'exec sleep 60'",
        )
    stops.join()


@pytest.mark.usefixtures("real_commands")
def test_an_agent_that_is_stopped_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_agents, "AGENT_SILENT_S", 1.0)
    monkeypatch.setattr(host_agents, "END_S", 1.0)
    memory = Memory(lambda m: os.kill(agent_of(m), signal.SIGSTOP))
    with pytest.raises(LaunchError, match="the agent on localhost has shown no sign of life for 1 s"):
        launch_entry("work_until_stopped", tmp_path, memory, link_timeout_s=0.3)


@pytest.mark.usefixtures("real_commands")
def test_paused_agents_and_frozen_containers_cost_no_worker_and_a_stalled_disk_holds_up_nobody(
    tmp_path: Path,
):
    """The pauses are longer than a worker may be silent. Nobody reads the first log, as if its disk hung."""
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "rank0.out")
    memory = Memory(pause_agents_then_stop(2.6, workers_too=(False, True)))
    results = launch_entry("work_elastic", tmp_path, memory, elastic=ElasticRules(2, 2, heartbeat_s=2.0))
    assert sorted(results) == [0, 1]
    assert [line for line in memory.lines if "warning" in line] == []
    assert "[localhost 0] worker 0 stops" in memory.lines


def test_workers_that_fail_before_they_join_are_given_up_and_the_rest_goes_on(tmp_path: Path):
    class UntilGivenUp(Memory):
        def printed(self, line: str) -> None:
            super().printed(line)
            if "no more workers" in line:
                self.supervisor.request_stop()

    memory = UntilGivenUp(lambda m: m.supervisor.request_control(ControlRequest(workers=3)))
    results = launch_entry("work_elastic", tmp_path, memory, elastic=ElasticRules(2, 3))
    assert sorted(results) == [0, 1]
    said = [line for line in memory.lines if line.startswith("warning")]
    reason = "could not join (FileNotFoundError: no such folder: /data/digits); the rest goes on"
    assert said[:3] == [f"warning: worker {worker} on localhost {reason}" for worker in (2, 3, 4)]
    assert said[3].startswith("warning: no more workers are started after 3 that could not join (its log: ")


# Reaches no other host, but a process stands between its input and what it runs.
RELAY = """
link="${0%/*}/link"
mkfifo "$link"
exec 3<&0
cat <&3 >"$link" 2>/dev/null &
shift
exec "$@" <"$link" 3<&-
"""


@pytest.mark.usefixtures("real_commands")
def test_what_is_left_on_a_host_that_is_cut_off_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What the supervisor says goes through a process that is stopped: no end of the stream is seen."""
    monkeypatch.setattr(host_agents, "AGENT_TIMEOUT_FACTOR", 0.1)
    monkeypatch.setattr(agent_stream, "BEAT_S", 0.2)
    relay, cut = tmp_path / "relay.sh", list[psutil.Process]()
    relay.write_text(RELAY)

    def cut_off(memory: Memory) -> None:
        cut.extend(p for p in psutil.Process().children(recursive=True) if p.name() == "cat")
        cut[0].suspend()

    try:
        with pytest.raises(LaunchError, match="the agent on away"):
            launch_entry(
                "work_until_stopped",
                tmp_path,
                Memory(cut_off),
                hosts=(Host("away", 1),),
                shell=f"sh {relay} {{host}}",
                nic="lo",
            )
        end = time.monotonic() + 20
        while left_behind() and time.monotonic() < end:
            time.sleep(0.02)  # a look at all processes takes CPU time
        assert left_behind() == []
        assert (tmp_path / "logs" / "rank0.err").read_text().endswith("all workers on this host are ended\n")
    finally:
        for process in cut:
            process.kill()


def test_what_workers_printed_before_stays_in_their_logs(tmp_path: Path):
    for _ in range(2):
        launch_entry("add_ranks", tmp_path, Memory())
    assert (tmp_path / "logs" / "rank1.out").read_text() == "out of 1\n" * 2


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path):
    """As under nohup: the end of the terminal does not end the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        memory = Memory(lambda m: (os.kill(os.getpid(), signal.SIGHUP), m.supervisor.request_stop()))
        results = launch_entry("work_until_stopped", tmp_path, memory)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert memory.stops == 1
    assert results[0]["stopped"]
