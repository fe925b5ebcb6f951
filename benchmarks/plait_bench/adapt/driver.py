"""Doing things to a job while it runs: asking it for other workers, killing one of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.launch.display import Silent, WorkerState
from plait.launch.run_dir import RunDir, find_run

# Something to do to a run and its workers.
Act = Callable[[RunDir, tuple[WorkerState, ...]], None]


class Driver(Silent):
    """Does what is left to do, one thing after the other, each `quiet_steps` after the one before."""

    def __init__(self, name: str, acts: Sequence[Act], run_dir: Path, quiet_steps: int) -> None:
        self._name = name
        self._acts = list(acts)
        self._run_dir = run_dir
        self._quiet_steps = quiet_steps
        self._quiet_since: int | None = None
        self._busy = False

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self._workers = workers
        self._quiet_since, self._busy = None, False

    def progressed(self, progress: Mapping[str, Any]) -> None:
        step = int(progress["step"])
        if self._quiet_since is None:
            self._quiet_since = step
        if self._busy or step < self._quiet_since + self._quiet_steps or not self._acts:
            return
        self._busy = True
        # In a thread of its own: this one answers the request.
        act, run = self._acts.pop(0), find_run(self._name, self._run_dir)
        threading.Thread(target=act, args=(run, self._workers), daemon=True).start()


class KillWorker:
    """Kills the worker of a rank, and notes when."""

    def __init__(self, rank: int) -> None:
        self.at: float | None = None
        self._rank = rank

    def __call__(self, _: RunDir, workers: tuple[WorkerState, ...]) -> None:
        self.at = time.time()
        os.kill(workers[self._rank].pid, signal.SIGKILL)
