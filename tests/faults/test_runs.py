"""Runs that go wrong keep what they have: no checkpoint is lost, no folder spoilt, no end without words."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.core.errors import InputError, PlaitError
from plait.jobs.evaluate import measure_run
from plait.launcher.display import Silent
from plait.launcher.environment import check_alone
from plait.launcher.run_dir import RunDir
from plait.training.checkpoint import list_checkpoints, load
from support.capabilities import may

pytestmark = pytest.mark.usefixtures("forked_commands", "no_pictures")

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(HERE)  # workers look there too


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    content = {
        "name": "t",
        "model": "broken:line",
        "data": {"kind": "broken:samples", "batch_size": 8},
        "loss": "mse",
        "optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
        "steps": 12,
        "checkpoint": {"every_steps": 3, "keep_last": 3},
        "run_dir": str(folder / "runs"),
    }
    return {**content, **changes}


@contextlib.contextmanager
def refused(words: str) -> Iterator[None]:
    """What is done inside is refused as bad input, by this process or by the workers."""
    with pytest.raises(PlaitError, match=words) as caught:
        yield
    assert caught.value.exit_status == InputError.exit_status


def steps_kept(run: Path) -> list[int]:
    return [load(path).step for path in list_checkpoints(run / "checkpoints")]


@pytest.mark.parametrize("loaders", [0, 1])
def test_an_input_that_breaks_in_mid_run_costs_no_checkpoint(loaders: int, tmp_path: Path):
    data = {"kind": "broken:samples", "batch_size": 8, "broken": 5, "watched": str(tmp_path / "runs")}
    with pytest.raises(PlaitError, match="img_5.png: cannot be decoded") as caught:
        plait.train(job(tmp_path, data={**data, "loaders": loaders}))
    assert caught.value.exit_status == 1
    run = tmp_path / "runs" / "t-001"
    assert steps_kept(run)[0] >= 6
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert "img_5.png" in (run / "failure.txt").read_text()


def test_a_job_that_cannot_start_leaves_nothing_and_its_folder_can_be_used(tmp_path: Path):
    for where in (None, str(tmp_path / "mine" / "below")):
        with refused("batch_size"):
            plait.train(
                job(tmp_path, data={"kind": "broken:samples", "batch_size": 64, "last_batch": "drop"}),
                run_folder=where,
            )
    own = job(tmp_path, parallel={"workers": 2, "topology": "broken:no_graphs"})
    with refused("parallel.topology: 'broken:no_graphs' failed with ValueError: no graphs today"):
        plait.sweep(own, {"seed": [0, 1]}, replicas=2, width=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with refused("batch_size"):
        plait.train(
            job(tmp_path, data={"kind": "broken:samples", "batch_size": 64, "last_batch": "drop"}),
            run_folder=str(tmp_path / "mine"),
        )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_refused_resume_leaves_the_run_as_it_was_and_a_right_one_goes_on(tmp_path: Path):
    plait.train(job(tmp_path))
    run = tmp_path / "runs" / "t-001"
    before = {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "events" not in str(path)
    }
    measured = measure_run(RunDir(run))
    with refused("has shape"):
        plait.train(job(tmp_path, steps=20, model_args={"width": 3}), resume=True)
    assert {path.name for path in before if path.read_bytes() != before[path]} <= {"rank0.err"}
    assert measure_run(RunDir(run)) == measured
    assert plait.train(job(tmp_path, steps=20), resume=True).step == 20
    assert "steps: 20" in (run / "job.yaml").read_text()


def test_a_loss_that_is_no_number_ends_the_run_also_where_the_loss_of_a_worker_would_not(tmp_path: Path):
    wild = {"kind": "sgd", "lr": 1e30, "momentum": 0.9}
    parallel = {"workers": 2, "sync": "partial-reduce"}
    # None is due before; it might find averaged weights that are no numbers before a loss is none.
    rare = {"every_steps": 10_000}
    words = r"the run has diverged: the loss is not a number at step .*; (the newest|there is no) checkpoint"
    with pytest.raises(PlaitError, match=words) as caught:
        plait.train(
            job(tmp_path, parallel=parallel, steps=10_000, log_every_steps=1, optimizer=wild, checkpoint=rare)
        )
    assert caught.value.exit_status == 1


class KillTheWriter(Silent):
    """Kills worker 0 while it writes the last checkpoint, once it is there to be seen."""

    def __init__(self, saving: Path) -> None:
        self._saving = saving
        self.lines: list[str] = []

    def printed(self, line: str) -> None:
        self.lines.append(line)

    def started(self, workers: tuple[Any, ...]) -> None:
        if workers[0].rank == 0:
            threading.Thread(target=self._kill, args=(workers[0].pid,), daemon=True).start()

    def _kill(self, pid: int) -> None:
        end = time.monotonic() + 60
        while not self._saving.exists() and time.monotonic() < end:
            time.sleep(0.01)
        # If the run ended without saving, another process may have this pid by now.
        if self._saving.exists():
            os.kill(pid, signal.SIGKILL)


def test_a_last_checkpoint_that_takes_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other workers are done long before it is written."""
    monkeypatch.setenv("PLAIT_SAVING", str(tmp_path / "saving"))
    slow = {"kind": "broken:slow_to_save", "seconds": 1.5, "batch_size": 9}
    result = plait.train(job(tmp_path, data=slow, parallel={"workers": 3, "sync": "partial-reduce"}))
    assert result.reason == "finished"
    assert steps_kept(tmp_path / "runs" / "t-001")[0] == 12


def test_where_the_writer_is_lost_another_worker_writes_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saving = tmp_path / "saving"
    monkeypatch.setenv("PLAIT_SAVING", str(saving))
    slow = {"kind": "broken:slow_to_save", "seconds": 1.0, "batch_size": 9}
    display = KillTheWriter(saving)
    options = {"workers": 3, "sync": "partial-reduce"}
    result = plait.train(job(tmp_path, data=slow, parallel=options), display=display)
    assert result.step == 12
    assert steps_kept(tmp_path / "runs" / "t-001")[0] == 12
    assert any("worker 0 on localhost is lost" in line for line in display.lines)


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (signal.SIGKILL, "ended by SIGKILL"),
        # A worker that hangs is named in launch/test_launch_faults.py.
        pytest.param(signal.SIGSTOP, "hangs: ", marks=pytest.mark.extended),
    ],
)
def test_a_sweep_ends_when_one_of_its_workers_does_whatever_the_jobs_sync_and_goes_on(
    number: int, what: str, tmp_path: Path
):
    class Disturb(Silent):
        def progressed(self, progress: Mapping[str, Any]) -> None:
            os.kill(self.workers[1].pid, number)

        def started(self, workers: tuple[Any, ...]) -> None:
            self.workers = workers

    parallel = {"workers": 2, "sync": "partial-reduce", "jitter": [1.0, 0.05]}
    over = {"optimizer.lr": [0.001, 0.002, 0.003, 0.004]}
    impatient = job(tmp_path, parallel={**parallel, "timeout_s": 8.0})
    with pytest.raises(PlaitError, match=f"worker 1 on localhost failed: {what}"):
        plait.sweep(impatient, over, width=1, display=Disturb())
    result = plait.sweep(job(tmp_path, parallel=parallel), resume=str(tmp_path / "runs" / "t-001"))
    assert [(trial.state, trial.step) for trial in result.trials] == [("finished", 12)] * 4


def test_a_folder_that_cannot_be_written_to_ends_in_one_message(tmp_path: Path):
    with pytest.raises(InputError, match=r"run_dir: found '/proc/nope', but no folder can be made there"):
        plait.train(job(tmp_path, run_dir="/proc/nope"))


@pytest.mark.skipif(not may("sys_admin"), reason="needs root, with its capabilities, to mount a small disk")
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"workers": 2}, id="all-reduce"),
        pytest.param({"workers": 3, "sync": "partial-reduce"}, id="partial", marks=pytest.mark.extended),
    ],
)
def test_a_full_disk_ends_the_run_in_one_message_and_it_goes_on_once_there_is_room(
    parallel: Mapping[str, Any], tmp_path: Path
):
    disk = tmp_path / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=250k", "none", str(disk)], check=True)
    try:
        wide = {
            "model_args": {"width": 2000},
            "optimizer": {"kind": "sgd", "lr": 1e-6, "momentum": 0.9},
            "parallel": dict(parallel),
            "data": {"kind": "broken:samples", "batch_size": 9},
        }
        with pytest.raises(PlaitError) as caught:
            plait.train(job(tmp_path, **wide, checkpoint={"every_steps": 3, "keep_last": 100}))
        assert "No space left on device; free some space and go on with --resume" in str(caught.value)
        assert "Traceback" not in caught.value.traceback
        assert json.loads((disk / "t-001" / "status.json").read_text())["state"] in ("failed", "running")
        kept = steps_kept(disk / "t-001")
        assert kept
        assert not list((disk / "t-001" / "checkpoints").glob(".step-*"))
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert plait.train(job(tmp_path, **wide), resume=True).step == 12
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_ctrl_c_in_the_first_moments_ends_with_status_130(tmp_path: Path):
    """While the command is still importing."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(10)\n"
    )
    command = [sys.executable, "-m", "plait", "status", "x"]
    where = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "plait: interrupted\n")


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}),
        ("srun", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}),
        ("Open MPI", {"OMPI_COMM_WORLD_SIZE": "2"}),
        ("MPICH", {"PMI_SIZE": "2", "PMI_RANK": "0"}),
    ],
)
def test_a_job_that_another_launcher_starts_several_times_is_told_that_each_would_train_all_of_it(
    launcher: str, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    check_alone({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "WORLD_SIZE": "4", "PMI_SIZE": "1"})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for start in (lambda: plait.train(job(tmp_path)), lambda: plait.sweep(job(tmp_path), {"seed": [0, 1]})):
        with pytest.raises(InputError, match=f"2 processes started by {launcher} .*-m plait.worker"):
            start()
    assert not (tmp_path / "runs").exists()
