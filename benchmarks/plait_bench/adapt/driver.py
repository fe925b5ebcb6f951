"""Doing things to a job while it runs: asking it for other workers, killing one of them, ending it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.core.events import Recorded
from plait.core.run_events import Step
from plait.launcher.display import Silent, WorkerState
from plait.launcher.run_dir import RunDir, find_run
from plait_bench.harness import recorded

# Something to do to a run and its workers.
Act = Callable[[RunDir, tuple[WorkerState, ...]], None]


class Driver(Silent):
    """Does one thing after the other, each once the workers changed so often, `quiet_steps` after that."""

    def __init__(self, name: str, acts: Sequence[tuple[int, Act]], run_dir: Path, quiet_steps: int) -> None:
        self._name = name
        self._acts = list(acts)
        self._run_dir = run_dir
        self._quiet_steps = quiet_steps
        self._quiet_since: int | None = None
        # The start of the run is none.
        self._changes = -1
        self.has_stopped = False

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self._workers = workers
        self._quiet_since = None
        self._changes += 1

    def progressed(self, progress: Mapping[str, Any]) -> None:
        step = int(progress["step"])
        if self._quiet_since is None:
            self._quiet_since = step
        is_quiet = step >= self._quiet_since + self._quiet_steps
        if not is_quiet or not self._acts or self._changes < self._acts[0][0]:
            return
        # In a thread of its own: this one answers the request.
        (_, act), run = self._acts.pop(0), find_run(self._name, self._run_dir)
        self.has_stopped = act is stop
        threading.Thread(target=act, args=(run, self._workers), daemon=True).start()


def stop(_: RunDir, __: tuple[WorkerState, ...]) -> None:
    """End the run in good order; its supervisor is this process."""
    os.kill(os.getpid(), signal.SIGTERM)


class KillWorker:
    """Kills the worker of a rank, and notes when."""

    def __init__(self, rank: int) -> None:
        self.at: float | None = None
        self._rank = rank

    def __call__(self, _: RunDir, workers: tuple[WorkerState, ...]) -> None:
        self.at = time.time()
        os.kill(workers[self._rank].pid, signal.SIGKILL)


def job(name: str, folder: str, parallel: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A job on digits whose every step is recorded."""
    return {
        "name": name,
        "data": {"kind": "digits", "batch_size": 32},
        "optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9},
        "device": "cpu",
        "log_every_steps": 1,
        "parallel": {"threads": 1, **parallel},
        "run_dir": folder,
        **more,
    }


def trained(
    job: Mapping[str, Any], acts: Sequence[tuple[int, Act]], quiet_steps: int
) -> tuple[RunDir, list[Recorded]]:
    """The folder of a run to which `acts` were done meanwhile, and its record in the order of time.

    Each act waits until the workers have changed as often as the number before it says.
    """
    from plait.jobs.train import train  # reads job files

    driver = Driver(job["name"], acts, Path(job["run_dir"]), quiet_steps)
    result = train(job, display=driver)
    if result.reason == "stopped" and not driver.has_stopped:
        raise KeyboardInterrupt  # the run took the signal that was meant for the experiment
    folder = RunDir(Path(result.run))
    return folder, recorded(folder)


def losses(found: Sequence[Recorded]) -> dict[int, float]:
    """The loss of each step, as it was last taken."""
    taken = {line.event.step: line.event.loss for line in found if isinstance(line.event, Step)}
    return {step: float("nan") if loss is None else loss for step, loss in sorted(taken.items())}


def apart(one: Sequence[Recorded], other: Sequence[Recorded]) -> float | None:
    """The largest difference of a step's loss in two runs, None where they have not the same steps."""
    ours, theirs = losses(one), losses(other)
    if not ours or ours.keys() != theirs.keys():
        return None
    return max(abs(ours[step] - theirs[step]) for step in theirs)
