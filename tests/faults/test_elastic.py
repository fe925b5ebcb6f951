"""Elastic jobs that lose workers, links or their supervisor: they go on, or end with what they have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import plait
from elastic_soak import ElasticSoak
from plait.cli import app
from plait.core import events
from plait.core.errors import PlaitError
from plait.core.run_events import WorkersChanged
from plait.launcher.control import ask_job
from plait.launcher.display import Silent, WorkerState
from plait.launcher.run_dir import RunDir, find_run
from plait.measure import auto_plan
from plait.planner import Schedule, save_plan
from plait.schema.job import make_job
from plait.training.checkpoint import list_checkpoints, load
from support import plans
from support.commands import real_commands
from support.hosts import Hosts
from support.training import largest_difference, train_here

pytestmark = pytest.mark.usefixtures("forked_commands")

DEADLINE_S = 90.0


def job(folder: Path, parallel: Mapping[str, Any], steps: int = 60, **changes: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "model": "plait.workloads.mlp:mlp_tiny",
        "data": {"kind": "digits", "batch_size": 60},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "steps": steps,
        "precision": "float64",
        "verify": "off",  # the tests compare the weights
        "device": "cpu",
        "log_every_steps": 1,
        "checkpoint": {"every_steps": 10},
        "parallel": {"elastic": True, "threads": 1, "jitter": [1.0, 0.01], **parallel},
        "run_dir": str(folder / "runs"),
        **changes,
    }


def weights_of(run: Path) -> dict[str, Any]:
    return load(list_checkpoints(run / "checkpoints")[0]).model


def weights_in_peace(folder: Path, steps: int) -> dict[str, Any]:
    """The weights of the same run in one process."""
    settings = make_job(job(folder, {"workers": 1, "jitter": [0.0, 0.0]}, steps)).settings()
    return train_here(settings, folder / "peace")[1]


class AtStep(Silent):
    """Does something once the run has come to a step; keeps what is said and who takes part."""

    def __init__(
        self, folder: Path, step: int, act: Callable[[RunDir, tuple[WorkerState, ...]], None]
    ) -> None:
        self._runs = folder / "runs"
        self._step = step
        self._act: Callable[[RunDir, tuple[WorkerState, ...]], None] | None = act
        self.lines: list[str] = []
        self.seen: list[tuple[int, ...]] = []
        # The ranks of each stage as it was last told.
        self.stages: list[list[int]] = []

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self._workers = workers
        self.seen.append(tuple(worker.rank for worker in workers))

    def progressed(self, progress: Mapping[str, Any]) -> None:
        self.stages = progress.get("stages", [])
        if progress["step"] >= self._step and self._act is not None:
            act, self._act = self._act, None
            act(find_run("t", self._runs), self._workers)

    def printed(self, line: str) -> None:
        self.lines.append(line)


# Each fault by itself is below, in cli/test_resize.py and launch/test_launch_faults.py.
@pytest.mark.extended
@pytest.mark.usefixtures("real_commands")
def test_random_faults_and_resizes_change_nothing_about_how_a_run_ends(tmp_path: Path):
    result = ElasticSoak(tmp_path, steps=160).try_once(seed=3)
    assert result.wrong == [], result.said
    assert result.faults.total() > 0


def test_fewer_workers_than_the_job_asks_for_end_it_with_a_checkpoint(tmp_path: Path):
    def kill_the_first(folder: RunDir, workers: tuple[WorkerState, ...]) -> None:
        os.kill(workers[0].pid, signal.SIGKILL)

    display = AtStep(tmp_path, 5, kill_the_first)
    limits = {"workers": 2, "min_workers": 2, "max_workers": 2}
    words = (
        r"1 of at least 2 workers \(parallel.min_workers\) are left: worker 0 ended by SIGKILL; "
        r"a checkpoint was written: go on with --resume"
    )
    with pytest.raises(PlaitError, match=words) as caught:
        plait.train(job(tmp_path, limits, steps=10_000), display=display)
    assert caught.value.exit_status == 1
    run = tmp_path / "runs" / "t-001"
    kept = load(list_checkpoints(run / "checkpoints")[0]).step
    assert kept >= 5
    assert plait.train(job(tmp_path, limits, steps=kept + 10), resume=True).step == kept + 10
    peace = weights_in_peace(tmp_path, kept + 10)
    assert largest_difference(weights_of(run), peace) < 1e-9


# A pipeline goes on without one in training/test_elastic_pipelines.py, a job replaces one below.
@pytest.mark.extended
def test_a_pipeline_goes_on_without_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auto_plan, "MEASURE_S", 0.1)

    def kill_the_first(folder: RunDir, workers: tuple[WorkerState, ...]) -> None:
        os.kill(workers[0].pid, signal.SIGKILL)

    display = AtStep(tmp_path, 5, kill_the_first)
    plan = {"workers": 3, "plan": "model-parallel", "schedule": "flush", "microbatches": 3}
    made = plait.train(job(tmp_path, {**plan, "jitter": [0.1, 0.01]}, steps=40), display=display)
    # Measured on a busy machine, the plan may have use for two of the workers only.
    first, left, *later = display.seen
    assert first in ((0, 1, 2), (0, 1)), display.lines
    assert left == first[1:]
    # Another takes its place, unless the run has ended by then.
    assert not later or later[0] == (*left, len(first)), display.lines
    ranks = sorted(rank for stage in display.stages for rank in stage)
    assert ranks == list(range(len(display.seen[-1]))), display.stages
    assert largest_difference(weights_of(Path(made.run)), weights_in_peace(tmp_path, 40)) < 1e-9


class GrowLoseStop(Silent):
    """Asks for a third worker, kills the first once that has joined, and stops the run once replaced."""

    def __init__(self, folder: Path) -> None:
        self._runs = folder / "runs"
        self.seen: list[tuple[int, ...]] = []
        self.lines: list[str] = []
        self._has_asked = False

    def progressed(self, progress: Mapping[str, Any]) -> None:
        if not self._has_asked:
            self._has_asked = True
            run = find_run("t", self._runs)
            threading.Thread(target=ask_job, args=(run, {"workers": 3})).start()

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self.seen.append(tuple(worker.rank for worker in workers))
        if len(workers) == 3:
            is_whole = 0 in self.seen[-1]
            os.kill(
                workers[0].pid if is_whole else os.getpid(), signal.SIGKILL if is_whole else signal.SIGTERM
            )

    def printed(self, line: str) -> None:
        self.lines.append(line)


# Each way to average takes workers in and goes on without them in training/test_elastic_averaging.py. With
# stages, the third worker waits and then takes the place of the first, whose stage goes back to a checkpoint.
@pytest.mark.parametrize(
    ("sync", "in_stages"),
    [
        ("partial-reduce", True),
        # Without stages, workers come and go in tests/training/test_elastic_averaging.py.
        pytest.param("partial-reduce", False, marks=pytest.mark.extended),
        pytest.param("ad-psgd", False, marks=pytest.mark.extended),
        pytest.param("local-sgd", False, marks=pytest.mark.extended),
    ],
)
def test_a_job_that_averages_takes_workers_in_and_replaces_one_that_is_killed(
    sync: str, in_stages: bool, tmp_path: Path
):
    display = GrowLoseStop(tmp_path)
    parallel: dict[str, Any] = {"workers": 2, "max_workers": 3, "sync": sync}
    if in_stages:
        settings = plans.in_stages(
            make_job(job(tmp_path, {"workers": 2})).settings(),
            plans.straight_layout((2, 2)),
            Schedule.FLUSH,
            microbatches=4,
        )
        save_plan(settings.stages.plan, tmp_path / "plan.json")
        parallel |= {"plan": str(tmp_path / "plan.json"), "min_workers": 2}
    made = plait.train(job(tmp_path, parallel, steps=1_000_000), display=display)
    assert display.seen == [(0, 1), (0, 1, 2), (1, 2), (1, 2, 3)], display.lines
    assert made.reason == "stopped"
    run = RunDir(Path(made.run))
    # Worker 1 keeps the record where the first is killed, with what that may not have written down.
    recorded = [line.event for line in events.read(run.events(1))]
    changes = [event for event in recorded if isinstance(event, WorkersChanged)]
    assert [(change.joined, change.lost) for change in changes] == [((), (0,)), ((3,), ())]
    assert load(list_checkpoints(run.checkpoints)[0]).step == made.step


def test_when_the_supervisor_is_killed_nothing_is_left_and_the_run_can_be_resumed(tmp_path: Path):
    asked = make_job(job(tmp_path, {"workers": 2, "max_workers": 3}, steps=10_000))
    path = tmp_path / "job.yaml"
    path.write_text(asked.text())
    mark = {"PLAIT_TEST_MARK": str(tmp_path)}
    command = [sys.executable, "-m", "plait", "train", str(path), "-q"]
    with real_commands():  # of which the tree of processes is
        process = subprocess.Popen(command, env={**os.environ, **mark})
    run = RunDir(tmp_path / "runs" / "t-001")
    try:
        ours = _await(lambda: _marked(str(tmp_path)) if list_checkpoints(run.checkpoints) else [])
        with pytest.raises(PlaitError, match="this run is going on already"):
            plait.train(asked, resume=True)
        # A joiner is on its way when it happens.
        ask_job(run, {"workers": 3})
    finally:
        process.kill()
        process.wait()
    _await(lambda: not [p for p in ours if p.is_running()] and not _marked(str(tmp_path)))
    status = CliRunner().invoke(app, ["status", str(run.path)])
    assert f"{run.path}: died" in status.stdout
    assert status.stdout.count("ended") >= 2
    kept = load(list_checkpoints(run.checkpoints)[0]).step
    plait.train(job(tmp_path, {"workers": 2, "max_workers": 3}, steps=kept + 5), resume=True)
    assert largest_difference(weights_of(run.path), weights_in_peace(tmp_path, kept + 5)) < 1e-9


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PLAIT_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _await(find: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := find()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return found


def test_a_host_that_joins_takes_part_and_one_behind_a_cut_link_is_left_out(tmp_path: Path, hosts: Hosts):
    hosts.make("w0", "w1", "w2")

    def grow(folder: RunDir, workers: tuple[WorkerState, ...]) -> None:
        threading.Thread(target=ask_job, args=(folder, {"workers": 3})).start()

    class ThenCut(AtStep):
        def started(self, workers: tuple[WorkerState, ...]) -> None:
            super().started(workers)
            if len(workers) == 3:
                threading.Thread(target=hosts.cut, args=("w1",)).start()

    display = ThenCut(tmp_path, 10, grow)
    cluster = {
        "hosts": ["w0:1", "w1:1", "w2:1"],
        "shell": hosts.shell,
        "nic": "eth0",
        "link_timeout_s": 2.0,
    }
    made = plait.train(job(tmp_path, {"workers": 2}, steps=200, cluster=cluster), display=display)
    assert display.seen == [(0, 1), (0, 1, 2), (0, 2)], display.lines
    recorded = events.read(RunDir(Path(made.run)).events())
    changes = [line.event for line in recorded if isinstance(line.event, WorkersChanged)]
    assert [(change.joined, change.lost) for change in changes] == [((2,), ()), ((), (1,))]
    assert largest_difference(weights_of(Path(made.run)), weights_in_peace(tmp_path, 200)) < 1e-9
    assert hosts.processes() == []
