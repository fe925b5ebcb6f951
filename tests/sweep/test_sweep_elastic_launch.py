"""Elastic sweeps with their launcher: resized, killed and stopped workers, and what is refused."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.core.errors import InputError
from plait.jobs.sweep import make_sweep, placement_of
from plait.launcher.control import ask_job
from plait.launcher.display import Silent, WorkerState
from plait.launcher.run_dir import find_run
from plait.schema.job import make_job
from plait.schema.results import SweepResult
from support.hosts import Hosts
from support.sweeping import same_table, sweep_here

pytestmark = pytest.mark.usefixtures("forked_commands", "no_pictures")

OVER = {"optimizer.lr": [0.3, 0.1, 0.03, 0.01], "optimizer.momentum": [0.0, 0.9]}
Act = Callable[["ActsInTurn", tuple[WorkerState, ...]], None]


def job(folder: Path, **parallel: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "model": "support.elastic_sweep:GatedNet",
        "model_args": {"gate": str(folder / "gate")},
        "data": {"kind": "support.training:digits", "batch_size": 60},
        "optimizer": {"kind": "sgd", "lr": 0.05},
        "steps": 60,
        "precision": "float64",
        "verify": "off",
        "device": "cpu",
        "evaluate": {"every_steps": 12},
        "parallel": {"elastic": True, "threads": 1, **parallel},
        "run_dir": str(folder / "runs"),
    }


TESTS = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))


class ActsInTurn(Silent):
    """Does one thing after the other, each once the members are those that it is for and all have trials.

    Of a group of `size` workers its first one has them.
    """

    def __init__(self, folder: Path, acts: Mapping[tuple[int, ...], Act], size: int = 1) -> None:
        self._folder = folder
        self._size = size
        self._acts = dict(acts)
        self._workers: tuple[WorkerState, ...] = ()
        self.seen: list[tuple[int, ...]] = []
        self.lines: list[str] = []

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self._workers = workers
        self.seen.append(tuple(worker.rank for worker in workers))

    def progressed(self, progress: Mapping[str, Any]) -> None:
        training = {array["worker"] for array in progress["arrays"]}
        are_busy = len(training & set(self.seen[-1])) >= len(self.seen[-1]) // self._size
        if are_busy and (act := self._acts.pop(self.seen[-1], None)) is not None:
            act(self, self._workers)

    def printed(self, line: str) -> None:
        self.lines.append(line)

    def resize(self, workers: int) -> None:
        folder = find_run("t", self._folder / "runs")
        # The supervisor, which calls this, answers.
        threading.Thread(target=ask_job, args=(folder, {"workers": workers})).start()

    def open_gate(self) -> None:
        (self._folder / "gate").touch()


def check_equal(found: SweepResult, asked: dict[str, Any], folder: Path) -> None:
    (folder / "gate").touch()
    one = sweep_here(make_sweep(make_job(asked), OVER, width=8), folder / "one")
    assert found.reason == "finished"
    assert same_table(one, found.to_dict())


def test_resized_killed_and_stopped_workers_change_no_trial_of_a_sweep(tmp_path: Path):
    acts: dict[tuple[int, ...], Act] = {
        (0,): lambda display, workers: display.resize(3),
        (0, 1, 2): lambda display, workers: os.kill(workers[0].pid, signal.SIGKILL),
        # The next one that coordinates hangs.
        (1, 2, 3): lambda display, workers: os.kill(workers[0].pid, signal.SIGSTOP),
        (2, 3, 4): lambda display, workers: display.resize(1),
        (2,): lambda display, workers: display.open_gate(),
    }
    display = ActsInTurn(tmp_path, acts)
    asked = job(tmp_path, workers=1, max_workers=3, heartbeat_s=4.0)
    # All trials begin in one array, of which those that join get parts.
    found = plait.sweep(asked, OVER, width=8, display=display)
    assert display.seen == [(0,), (0, 1, 2), (1, 2), (1, 2, 3), (2, 3), (2, 3, 4), (2,)], display.lines
    check_equal(found, asked, tmp_path)


# A cut link is that of a job in faults/test_elastic.py; that lost trials go on is above.
@pytest.mark.extended
def test_the_trials_behind_a_cut_link_go_on_on_another_host(tmp_path: Path, hosts: Hosts):
    hosts.make("w0", "w1")
    acts: dict[tuple[int, ...], Act] = {
        (0, 1): lambda display, workers: threading.Thread(target=hosts.cut, args=("w1",)).start(),
        (0,): lambda display, workers: display.open_gate(),
    }
    display = ActsInTurn(tmp_path, acts)
    asked = job(tmp_path, workers=2)
    cluster = {"hosts": ["w0:1", "w1:1"], "shell": hosts.shell, "nic": "eth0", "link_timeout_s": 2.0}
    found = plait.sweep({**asked, "cluster": cluster}, OVER, width=4, display=display)
    assert display.seen == [(0, 1), (0,)], display.lines
    assert {array.worker for array in found.arrays} == {0, 1}
    check_equal(found, asked, tmp_path)
    assert hosts.processes() == []


# Without processes of their own, groups form anew in tests/test_engines.py; the one above has workers killed.
@pytest.mark.extended
def test_groups_of_workers_form_anew_when_one_is_killed_and_when_the_sweep_is_resized(tmp_path: Path):
    acts: dict[tuple[int, ...], Act] = {
        (0, 1, 2, 3): lambda display, workers: os.kill(workers[0].pid, signal.SIGKILL),
        # The worker that is left of the first group forms another one with the one that has come.
        (1, 2, 3, 4): lambda display, workers: display.resize(2),
        # Each of these two was in another group.
        (1, 2): lambda display, workers: display.open_gate(),
    }
    display = ActsInTurn(tmp_path, acts, size=2)
    asked = job(tmp_path, workers=4, max_workers=4)
    found = plait.sweep(asked, OVER, width=4, replicas=2, display=display)
    assert display.seen == [(0, 1, 2, 3), (1, 2, 3), (1, 2, 3, 4), (1, 2)], display.lines
    assert {array.worker for array in found.arrays} >= {0, 1, 2}
    check_equal(found, asked, tmp_path)


def test_an_elastic_sweep_begins_with_whole_groups_of_workers():
    asked = make_job(job(Path("here"), workers=3, max_workers=4))
    with pytest.raises(
        InputError, match="--replicas: found 2, which does not divide the 3 workers; use -np 2"
    ):
        placement_of(asked, make_sweep(asked, OVER, replicas=2))
