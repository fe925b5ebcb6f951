"""What the display of a run is shown, in which order: no process is started here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.launcher.display import Silent, WorkerState
from plait.launcher.run import StatusFile
from plait.launcher.run_dir import RunDir


class Seen(Silent):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self.shown.append([worker.rank for worker in workers])

    def progressed(self, progress: Mapping[str, Any]) -> None:
        self.shown.append(progress["step"])


def test_the_display_learns_of_the_workers_before_it_learns_what_they_have_done(tmp_path: Path):
    seen, begun = Seen(), list[str]()
    status = StatusFile(RunDir(tmp_path), seen, lambda: begun.append("training"))
    workers = (WorkerState(0, "localhost", 10), WorkerState(1, "localhost", 11))
    # Worker 0 is at work before the second one is announced.
    status.progressed({"step": 0})
    status.progressed({"step": 1})
    assert begun == ["training"]
    assert seen.shown == []
    status.started(workers)
    status.progressed({"step": 2})
    # A change of members shows no progress twice.
    status.started(workers[:1])
    assert seen.shown == [[0, 1], 1, 2, [0]]
