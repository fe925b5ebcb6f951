"""Workers start, speak, fail, stop and end as the supervisor says, and none is left behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from plait.core.errors import InputError, LaunchError
from plait.launcher.messages import COORDINATOR
from plait.launcher.supervision.launch_errors import Interrupted, WorkerError
from plait.schema.hosts import Host, address_of, parse_hosts
from support.launching import Memory, launch_entry, left_behind

pytestmark = pytest.mark.usefixtures("forked_commands")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    yield
    end = time.monotonic() + 10
    while left_behind() and time.monotonic() < end:  # a killed agent's workers notice by themselves
        time.sleep(0.02)  # a look at all processes takes CPU time
    assert left_behind() == []


@pytest.mark.usefixtures("real_commands")
def test_workers_return_their_results_and_their_output_carries_host_and_rank(tmp_path: Path):
    memory = Memory()
    results = launch_entry("add_ranks", tmp_path, memory, threads=3, preload=("no.such.module", "wave"))
    assert [results[rank]["sum"] for rank in (0, 1)] == [1.0, 1.0]
    assert [results[rank]["preloaded"] for rank in (0, 1)] == [True, True]
    # Some libraries heed only what the environment says while they are loaded.
    assert [results[rank]["threads"] for rank in (0, 1)] == ["3", "3"]
    # Torch alone has this many objects; no collection should traverse them.
    assert all(results[rank]["kept"] > 100_000 for rank in (0, 1))
    assert [worker.pid for worker in memory.workers] == [results[rank]["pid"] for rank in (0, 1)]
    for rank in (0, 1):
        assert f"[localhost {rank}] out of {rank}" in memory.lines
        assert f"[localhost {rank}] err of {rank}" in memory.lines
        assert (tmp_path / "logs" / f"rank{rank}.out").read_text() == f"out of {rank}\n"
        assert (tmp_path / "logs" / f"rank{rank}.err").read_text() == f"err of {rank}\n"


@pytest.mark.parametrize(
    ("how", "message", "status"),
    [
        ("raise", "worker 1 on localhost failed: ZeroDivisionError: a fault of the model's", 1),
        ("kill", "worker 1 on localhost failed: ended by SIGKILL", 1),
        pytest.param(
            "terminate", "worker 1 on localhost failed: ended by SIGTERM", 1, marks=pytest.mark.extended
        ),
        ("exit", "worker 1 on localhost failed: ended with status 7", 1),
        ("input", "data.path: found nothing, expected a folder", 2),
    ],
)
def test_one_workers_failure_ends_all_and_names_the_cause(how, message, status, tmp_path: Path):
    memory = Memory()
    with pytest.raises(WorkerError) as caught:
        launch_entry("fail", tmp_path, memory, settings={"how": how})
    assert str(caught.value).splitlines()[0] == message
    assert (caught.value.rank, caught.value.exit_status) == (1, status)
    assert caught.value.traceback.count("Traceback") == (1 if how == "raise" else 0)
    assert not any("Traceback" in line for line in memory.lines)


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param((Host("localhost", 2),), marks=pytest.mark.extended),
        (Host("localhost", 1), Host("other", 1)),
    ],
)
def test_the_coordinator_answers_each_worker_and_its_result_comes_last(hosts, tmp_path: Path):
    shell = "env PLAIT_HOST={host}"
    changes = {"hosts": hosts, "shell": shell, "nic": "lo"} if len(hosts) > 1 else {"hosts": hosts}
    results = launch_entry("ask", tmp_path, Memory(), coordinator="entries:coordinate", **changes)
    assert results == {COORDINATOR: "for 2 workers", 0: [0, 2, 4, 6, 8, 10], 1: [2, 4, 6, 8, 10]}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "the coordinator on localhost failed: ended with status 7"),
        ("refuse", "--over: found nothing"),
    ],
)
def test_a_coordinator_that_fails_or_refuses_ends_the_job(how, message, tmp_path: Path):
    with pytest.raises(WorkerError) as caught:
        launch_entry("ask", tmp_path, Memory(), settings={"how": how}, coordinator="entries:coordinate")
    assert str(caught.value).splitlines()[0] == message


def test_a_stop_that_comes_before_the_workers_were_reported_reaches_them(tmp_path: Path):
    memory = Memory()
    results = launch_entry(
        "work_until_stopped", tmp_path, memory, prepare=lambda: memory.supervisor.request_stop()
    )
    assert all(results[rank]["stopped"] for rank in (0, 1))
    assert memory.stops == 1


def test_a_request_to_stop_reaches_every_worker(tmp_path: Path):
    memory = Memory(lambda m: m.supervisor.request_stop())
    results = launch_entry("work_until_stopped", tmp_path, memory)
    assert results[0] == results[1]
    assert results[0]["stopped"]
    assert memory.stops == 1


def test_progress_reaches_the_watcher(tmp_path: Path):
    memory = Memory()

    def stop_on_progress(progress) -> None:
        memory.progress.append(progress)
        if progress["step"] >= 10 and memory.stops == 0:
            memory.supervisor.request_stop()

    memory.progressed = stop_on_progress
    launch_entry("work_until_stopped", tmp_path, memory)
    steps = [p["step"] for p in memory.progress]
    assert steps == sorted(steps)
    assert steps[-1] >= 10


def test_settings_that_are_refused_start_no_worker(tmp_path: Path):
    memory = Memory()
    with pytest.raises(InputError, match="model: no such thing"):
        launch_entry("add_ranks", tmp_path, memory, check="entries:refuse")
    assert memory.workers == ()
    assert not (tmp_path / "logs").exists()


def test_two_jobs_on_one_host_have_stores_of_their_own(tmp_path: Path):
    first = Memory()

    def start_second(_: Memory) -> None:
        second = Memory()
        stores.append(launch_entry("add_ranks", tmp_path / "b", second)[0]["store"])
        first.supervisor.request_stop()

    stores: list[str] = []
    first.on_start = start_second
    results = launch_entry("work_until_stopped", tmp_path / "a", first)
    assert results[0]["stopped"]
    assert stores != [results[0]["store"]]


def test_a_shell_that_greets_does_no_harm(tmp_path: Path):
    shell = "sh -c 'echo welcome; shift; exec \"$@\"' sh {host}"
    memory = Memory()
    results = launch_entry("add_ranks", tmp_path, memory, hosts=(Host("127.0.0.1", 1),), shell=shell)
    assert results[0]["sum"] == 0.0
    assert "welcome" in memory.lines


def test_a_name_that_other_hosts_cannot_use_is_refused():
    with pytest.raises(InputError, match=r"-H: on localhost its own name resolves to 127\.0\.0\.1.*--nic"):
        address_of(None, Host("localhost", 1), single_host=False)


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path):
    with pytest.raises(
        LaunchError, match=r"the agent on nowhere \(reached by sh -c 'exit 7'\) ended with status 7"
    ):
        launch_entry("add_ranks", tmp_path, Memory(), hosts=(Host("nowhere", 1),), shell="sh -c 'exit 7'")


@pytest.mark.parametrize("text", ["w0:", "w0:x", ":2", "w0:0", "w0:00", "w0:1,w0:2", ""])
def test_hosts_that_make_no_sense_are_refused(text: str):
    with pytest.raises(InputError, match="-H: "):
        parse_hosts(text.split(","), "-H")


def test_hosts_are_read_as_written():
    assert parse_hosts(["w0:2", "w1"], "-H") == (Host("w0", 2), Host("w1", 1))


def test_an_interface_that_is_not_there_is_named():
    with pytest.raises(InputError, match="--nic: w0 has no interface 'et0'"):
        address_of("et0", Host("w0", 1), single_host=True)
    assert address_of("lo", Host("w0", 1), single_host=False) == "127.0.0.1"


def test_workers_with_nothing_to_save_are_ended_at_the_first_request_to_stop(tmp_path: Path):
    def stop(memory: Memory) -> None:
        assert memory.supervisor is not None
        memory.supervisor.request_stop()

    with pytest.raises(Interrupted, match="stopped at once: these workers save nothing") as caught:
        launch_entry("hang", tmp_path, Memory(stop), settings={"who": -1, "where": ""}, saves=False)
    assert caught.value.exit_status == 130
