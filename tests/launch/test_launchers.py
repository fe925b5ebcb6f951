"""Hosts that a launcher provides: taken, lost, found and taken away; and what is asked of Slurm."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import plait
from plait.core.errors import InputError, JobError, LaunchError
from plait.launcher.display import Silent, WorkerState
from plait.launcher.launchers import HostChanges, Launcher, Stream, attempts, slurm
from plait.launcher.launchers.attempts import run_on_hosts
from plait.launcher.launchers.choose import launcher_of_job
from plait.launcher.launchers.local import LocalLauncher, open_stream
from plait.launcher.launchers.slurm import SlurmLauncher
from plait.launcher.messages import Launch
from plait.launcher.run_dir import RunDir, RunKind
from plait.launcher.supervision.host_agents import HostAgents
from plait.launcher.supervision.launch_errors import HostLostError
from plait.schema.hosts import Host
from plait.schema.job import Job, make_job
from plait.schema.placement import HostAccess, Placement
from support.hosts import Hosts
from support.training import largest_difference

CONTENT: dict[str, Any] = {
    "name": "t",
    "model": "plait.workloads.mlp:mlp_tiny",
    "data": {"kind": "digits", "batch_size": 60},
    "optimizer": {"kind": "adam", "lr": 0.01},
    "precision": "float64",
    "steps": 40,
    "verify": "off",
    "log_every_steps": 1,
    "checkpoint": {"every_steps": 10},
}


def job_on(cluster: Mapping[str, Any], **changes: Any) -> Job:
    return make_job({**CONTENT, "cluster": cluster, **changes})


class Provider(Launcher):
    """Hosts of this machine by other names; what is lost and found is what a test says."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.streams: dict[str, Any] = {}
        self.new: list[Host] = []
        self.asked: list[tuple[int, int, set[str]]] = []
        self.given_back: list[tuple[str, ...]] = []
        self.left_s: float | None = None
        self.asked_again = 0

    def take_hosts(self, fewest: int, most: int, lost: Collection[str] = ()) -> tuple[Host, ...]:
        self.asked.append((fewest, most, {*lost}))
        names = [name for name in self.names if name not in lost]
        if len(names) < fewest:
            raise LaunchError(f"{len(names)} hosts are left")
        return tuple(Host(name, 1, "127.0.0.1") for name in names[:most])

    def start(self, host: Host, command: Sequence[str], environment: Mapping[str, str]) -> Stream:
        self.streams[host.name] = open_stream(command, environment)
        stream: Stream = self.streams[host.name]
        return stream

    def changed(self) -> HostChanges:
        new, self.new = tuple(self.new), []
        return HostChanges((), new)

    def notice(self) -> float | None:
        return self.left_s

    def give_back(self, hosts: Sequence[Host]) -> None:
        self.given_back.append(tuple(host.name for host in hosts))

    def ask_again(self, announce: Callable[[], None]) -> None:
        announce()
        self.asked_again += 1

    def kill(self, name: str) -> None:
        """As if the host had lost its power: the agent ends, and its workers with it."""
        os.kill(self.streams[name].pid, signal.SIGKILL)


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Provider]:
    def provided(*names: str) -> Provider:
        made = Provider(*names)
        monkeypatch.setattr(attempts, "launcher_of_job", lambda job: made)
        return made

    return provided


class AtStep(Silent):
    """Acts once the run has come to a step; keeps what is printed and where workers are."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act
        self.lines: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self.seen.append(tuple(worker.host for worker in workers))

    def progressed(self, progress: Mapping[str, Any]) -> None:
        if progress["step"] >= self._step:
            act, self._act = self._act, lambda: None
            act()

    def printed(self, line: str) -> None:
        self.lines.append(line)


def weights(run: str) -> dict[str, torch.Tensor]:
    return dict(plait.open_run(run).model().state_dict())


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run on two workers of this machine."""
    content = {**CONTENT, "run_dir": str(tmp_path_factory.mktemp("peace")), "parallel": {"workers": 2}}
    return weights(plait.train(content).run)


SLOWLY = {"jitter": [1.0, 0.02], "threads": 1}


@pytest.mark.usefixtures("forked_commands")
def test_a_run_that_loses_a_host_goes_on_from_its_checkpoint_on_another_bit_for_bit(
    provide: Callable[..., Provider], tmp_path: Path, in_peace: dict[str, torch.Tensor]
):
    provider = provide("a", "b", "c")
    display = AtStep(15, lambda: provider.kill("b"))
    slowly = {**SLOWLY, "jitter": [1.0, 0.1]}
    job = job_on({"on": "slurm", "nodes": 2}, run_dir=str(tmp_path), parallel=slowly)
    result = plait.train(job, display=display)
    assert display.seen == [("a", "b"), ("a", "c")], display.lines
    assert provider.asked == [(2, 2, set()), (2, 2, {"b"})]
    assert provider.given_back == [("a", "b"), ("a", "c")]
    assert any("going on from the newest checkpoint on a, c" in line for line in display.lines)
    found = weights(result.run)
    assert all(torch.equal(in_peace[name], found[name]) for name in in_peace)


# Without a launcher of hosts, faults/test_elastic.py has a host that joins and one that is lost.
@pytest.mark.extended
@pytest.mark.usefixtures("forked_commands")
def test_an_elastic_run_goes_on_without_a_lost_host_and_grows_onto_a_new_one(
    provide: Callable[..., Provider], tmp_path: Path
):
    provider = provide("a", "b")

    def replace_b() -> None:
        provider.kill("b")
        provider.new.append(Host("c", 1, "127.0.0.1"))

    class UntilGrown(AtStep):
        def started(self, workers: tuple[WorkerState, ...]) -> None:
            super().started(workers)
            if self.seen[-1] == ("a", "c"):
                os.kill(os.getpid(), signal.SIGTERM)

    display = UntilGrown(5, replace_b)
    cluster, parallel = {"on": "slurm", "nodes": "2:3"}, {**SLOWLY, "elastic": True}
    job = job_on(cluster, run_dir=str(tmp_path), parallel=parallel, steps=4000)
    result = plait.train(job, display=display)
    assert display.seen == [("a", "b"), ("a",), ("a", "c")], display.lines
    assert provider.asked == [(2, 3, set())]
    assert result.reason == "stopped"
    alone = plait.train({**CONTENT, "run_dir": str(tmp_path), "name": "alone", "steps": result.step})
    assert largest_difference(weights(result.run), weights(alone.run)) < 1e-9


@pytest.mark.usefixtures("forked_commands")
def test_a_run_whose_hosts_are_taken_away_writes_a_checkpoint_and_is_queued_again(
    provide: Callable[..., Provider], tmp_path: Path
):
    provider = provide("a")
    display = AtStep(3, lambda: setattr(provider, "left_s", 30.0))
    job = job_on({"on": "slurm"}, run_dir=str(tmp_path), parallel=SLOWLY, steps=4000)
    result = plait.train(job, display=display)
    assert (result.reason, provider.asked_again) == ("stopped", 1)
    assert result.step < 4000
    assert "the run is to end within 30 s: a checkpoint is written before" in " ".join(result.warnings)
    assert display.lines[-1].endswith("queued again; it goes on from the newest checkpoint")


def run_of(folder: Path, step: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"progress": {"step": step}}))
    return folder


@pytest.mark.parametrize(
    ("steps", "tries"),
    [
        ([7, 7, 7, 7, 7], 4),  # three restarts that come no further
        ([7, 8, 8, 9, 9, 9, 9, 9], 7),  # those that do count anew
        ([-1], 1),  # never trained: nothing to go on from
    ],
)
def test_restarts_without_progress_are_counted(
    steps: list[int], tries: int, provide: Callable[..., Provider], tmp_path: Path
):
    provide(*"abcdefghijk")
    made: list[Path | None] = []

    def run(job: Job, launcher: Launcher, folder: Path | None) -> SimpleNamespace:
        step = steps[len(made)]
        made.append(folder)
        failure = HostLostError("it is gone; go on with --resume", ())
        failure.folder = run_of(tmp_path / "run", step)
        raise failure

    with pytest.raises(HostLostError):
        run_on_hosts(job_on({"on": "slurm", "nodes": 1}), Silent(), run)
    assert made == [None, *[tmp_path / "run"] * (tries - 1)]


def test_wrong_input_and_failing_workers_are_not_tried_again(provide: Callable[..., Provider]):
    for failure in (InputError("wrong"), LaunchError("worker 1 failed")):
        provider, tries = provide("a", "b"), []

        def run(job: Job, launcher: Launcher, folder: Path | None) -> SimpleNamespace:
            tries.append(job.hosts)  # noqa: B023
            raise failure  # noqa: B023

        with pytest.raises(type(failure)):
            run_on_hosts(job_on({"on": "slurm", "nodes": 2}), Silent(), run)
        assert [[host.name for host in hosts] for hosts in tries] == [["a", "b"]]
        assert provider.given_back == [("a", "b")]


@pytest.mark.parametrize("by_user", [False, True])
def test_too_few_hosts_have_the_command_queued_again_unless_the_user_has_stopped_it(
    by_user: bool, provide: Callable[..., Provider], tmp_path: Path
):
    provider = provide("a", "b")

    def run(job: Job, launcher: Launcher, folder: Path | None) -> SimpleNamespace:
        failure = HostLostError("b is gone", ("b",))
        failure.folder = run_of(tmp_path / "run", 5)
        if by_user:
            RunDir(failure.folder).stop_request.touch()
        raise failure

    with pytest.raises(HostLostError, match="b is gone; 1 hosts are left"):
        run_on_hosts(job_on({"on": "slurm", "nodes": 2}), Silent(), run)
    assert provider.asked_again == (0 if by_user else 1)


# Of the run by itself: test_a_run_that_loses_a_host_goes_on_from_its_checkpoint_on_another_bit_for_bit.
@pytest.mark.extended
def test_a_host_behind_a_cut_link_is_reported_within_ten_seconds_and_replaced(
    tmp_path: Path, hosts: Hosts, in_peace: dict[str, torch.Tensor]
):
    """Of three hosts two are used; the one that is cut off is replaced by the third."""
    hosts.make("w0", "w1", "w2")
    times: list[float] = []

    def cut() -> None:
        times.append(time.monotonic())
        threading.Thread(target=hosts.cut, args=("w1",)).start()

    class Watch(AtStep):
        def printed(self, line: str) -> None:
            super().printed(line)
            if "going on from" in line:
                times.append(time.monotonic())

    display = Watch(12, cut)
    reach = tmp_path / "reach"
    # As with ssh: no answer from a host that cannot be reached.
    space = hosts.shell.format(host="$host").split()[-1]
    up = f"ip -n {space} link show up dev eth0 | grep -q eth0 || exit 255"
    reach.write_text(f'#!/bin/sh\nhost=$1; shift\n{up}\nexec ip netns exec {space} "$@"\n')
    reach.chmod(0o755)
    cluster = {"hosts": ["w0", "w1", "w2"], "nodes": 2, "shell": f"{reach} {{host}}", "nic": "eth0"}
    job = job_on(cluster, run_dir=str(tmp_path / "runs"), parallel={**SLOWLY, "jitter": [1.0, 0.1]})
    result = plait.train(job, display=display)
    assert display.seen == [("w0", "w1"), ("w0", "w2")], display.lines
    assert result.step == 40
    resumed = weights(result.run)
    assert all(torch.equal(in_peace[name], resumed[name]) for name in in_peace)
    began, noticed = times
    assert noticed - began < 10
    assert hosts.processes() == []


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"on": "lsf"}, "cluster.on: found 'lsf', expected local or ssh or slurm or ray"),
        ({"on": "ssh"}, "cluster.on: found 'ssh', but no hosts"),
        (
            {"on": "slurm", "hosts": ["w0"]},
            "cluster.hosts: found 1 with cluster.on: slurm, which means hosts",
        ),
        ({"on": "local", "hosts": ["w0"]}, "which means this machine alone"),
        ({"nodes": 2}, "cluster.nodes: found '2', but the job runs on this machine; .*--on"),
        ({"slots": 2}, "cluster.slots: found 2, but the job runs on this machine"),
        ({"hosts": ["w0"], "options": {"partition": "gpu"}}, "cluster.options: found 'partition', which is"),
        ({"on": "slurm", "nodes": "4:1"}, "expected the fewest first, as in 1:4"),
        (
            {"on": "slurm", "nodes": "some"},
            "found 'some', expected a number of hosts, such as 2, or the fewest",
        ),
        ({"on": "slurm", "nodes": 0}, "cluster.nodes: found '0', expected a number of hosts"),
        ({"hosts": ["w0", "w1"], "nodes": 3}, "cluster.nodes: found '3', but cluster.hosts has 2"),
        ({"on": "slurm", "restarts": -1}, "cluster.restarts: found -1"),
    ],
)
def test_keys_that_do_not_belong_to_the_engine_are_refused(cluster: dict[str, Any], words: str):
    with pytest.raises(JobError, match=words):
        job_on(cluster)


def test_ray_without_the_package_and_slurm_without_a_job_say_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(InputError, match="no Slurm job .* salloc or a batch script, or add --submit"):
        launcher_of_job(job_on({"on": "slurm"}))


def test_workers_get_the_variables_that_match_a_pattern(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_TEST_A", "1")
    monkeypatch.setenv("NCCL_TEST_B", "2")
    placement = Placement(forward=("NCCL_TEST_*",), environment={"NCCL_TEST_B": "3"})
    hosts = HostAgents(Launch(placement, "entry", {}), LocalLauncher(), Silent())
    assert hosts.placement.environment == {"NCCL_TEST_A": "1", "NCCL_TEST_B": "3"}


NODES = """\
NodeName=g1 Gres=gpu:4 NodeAddr=10.0.0.1 NodeHostName=g1 State=ALLOCATED ThreadsPerCore=1
NodeName=g2 Gres=gpu:4 NodeAddr=g2.cluster NodeHostName=g2 State=MIXED+DRAIN ThreadsPerCore=1
NodeName=g3 Gres=gpu:4 NodeAddr=10.0.0.3 NodeHostName=g3 State=DOWN*+DRAIN ThreadsPerCore=1
NodeName=g4 Gres=gpu:4 NodeAddr=10.0.0.4 NodeHostName=g4 State=ALLOCATED+NOT_RESPONDING ThreadsPerCore=1
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What Slurm's commands are asked, in a job of four nodes with four GPUs each."""
    commands: list[tuple[str, ...]] = []
    answers = {"squeue": "RUNNING", "hostnames": "g1\ng2\ng3\ng4", "node": NODES, "requeue": ""}

    def answer(*command: str) -> str:
        commands.append(command)
        known = [each for each in (*command[:1], *command[1:3]) if each in answers]
        return "g[1-4]" if command[-1] == "%N" else answers[known[-1]]

    monkeypatch.setattr(slurm, "_ask", answer)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", slurm.REQUEUE):
        monkeypatch.delenv(name, raising=False)
    return commands


def test_nodes_of_a_slurm_job_are_those_that_are_up_with_a_worker_for_each_gpu(
    asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
):
    launcher = SlurmLauncher(HostAccess())
    assert launcher.take_hosts(1, 9) == (Host("g1", 4, "10.0.0.1"), Host("g2", 4))
    assert launcher.take_hosts(1, 1) == (Host("g1", 4, "10.0.0.1"),)
    assert launcher.take_hosts(1, 9, {"g1"}) == (Host("g2", 4),)
    assert SlurmLauncher(HostAccess(slots=2)).take_hosts(1, 1)[0].slots == 2
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    assert launcher.take_hosts(1, 1)[0].slots == 1
    with pytest.raises(LaunchError, match="has 2 nodes that can be used of g1, g2, g3, g4, expected 3"):
        launcher.take_hosts(3, 4)


def test_a_signal_of_slurm_is_a_notice_and_the_job_is_queued_again_by_its_own_number(
    asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
):
    launcher = SlurmLauncher(HostAccess(grace_s=60.0))
    assert launcher.notice() is None
    assert not launcher.signalled(signal.SIGINT)
    assert launcher.signalled(signal.SIGUSR1)
    left_s = launcher.notice()
    assert left_s is not None
    assert 50 < left_s <= 60
    announced: list[int] = []
    # A script that does not go on by itself would start from the beginning.
    launcher.ask_again(lambda: announced.append(1))
    assert announced == []
    monkeypatch.setenv(slurm.REQUEUE, "1")
    SlurmLauncher(HostAccess()).ask_again(lambda: announced.append(1))
    assert (announced, asked[-1]) == ([1], ("scontrol", "requeue", "7"))
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    SlurmLauncher(HostAccess()).ask_again(lambda: announced.append(1))
    assert asked[-1] == ("scontrol", "requeue", "5_2")


def test_a_batch_script_starts_the_command_and_goes_on_with_it(tmp_path: Path):
    options = {"partition": "gpu", "gres": "gpu:4", "exclusive": True, "time": "4:00:00", "comment": "a b"}
    job = job_on({"on": "slurm", "nodes": "1:4", "options": options, "grace_s": 30})
    words = [
        "train",
        "job.yaml",
        "--on=slurm",
        "--submit",
        "--set",
        "seed=1",
        "--json",
        "--run",
        "x",
        "--nodes",
        "1:4",
    ]
    text = slurm.batch_script(job, RunKind.TRAIN, words, tmp_path)
    for line in ("nodes=1-4", "requeue", "no-kill", "open-mode=append", "signal=B:TERM@30", "partition=gpu",
                 "gres=gpu:4", "exclusive", "time=4:00:00", "comment='a b'"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text
    plait_command = f"exec {sys.executable} -P -m plait train job.yaml --on=slurm --set seed=1 --nodes 1:4"
    assert f"\n  {plait_command} --resume --run {tmp_path}\n" in text
    assert f"\n{plait_command} --run {tmp_path}\n" in text
    words = ["sweep", "job.yaml", "--over", "seed=1,2", "--on", "slurm", "--set", "epochs=2",
             "--set", "cluster.slots=2", "--submit"]  # fmt: skip
    text = slurm.batch_script(job_on({"on": "slurm", "nodes": 2}), RunKind.SWEEP, words, tmp_path)
    again = "plait sweep job.yaml --on slurm --set cluster.slots=2 --resume"
    assert f"{again} {tmp_path}\n" in text
    assert "plait sweep job.yaml --over seed=1,2 --on slurm --set epochs=2" in text
    assert "#SBATCH --nodes=2\n" in text
