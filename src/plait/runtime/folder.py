"""The run folder: where a run keeps its events, logs, checkpoints and state, and how one finds it again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from pathlib import Path
from typing import IO

from plait.core.errors import InputError
from plait.core.names import nearest


class RunFolder:
    """The paths of one run below `path`; `made` are the folders that were created for it."""

    def __init__(self, path: Path, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self.made = made
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.settings = path / "settings.json"
        self.job = path / "job.yaml"
        self.status = path / "status.json"
        self.result = path / "result.json"
        self.failure = path / "failure.txt"

    def events(self, rank: int = 0) -> Path:
        return self.path / "events" / f"rank{rank}.jsonl"

    def lock(self) -> IO[str]:
        """Hold this folder for one supervisor; the system lets go when the process ends, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / ".lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InputError(
                f"{self.path}: this run is going on already; see: plait status {self.path}"
            ) from None
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        file.flush()
        return file

    def holder(self) -> tuple[str, int] | None:
        """The host and process of the supervisor that holds this folder now, or None."""
        try:
            with (self.path / ".lock").open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    found = json.loads(file.read() or "{}")
                    return str(found.get("host", "")), int(found.get("pid", 0))
        except FileNotFoundError:
            pass
        return None


def new_run(run_dir: Path, name: str) -> RunFolder:
    """A fresh folder `run_dir/name-NNN`, numbered after the last one."""
    made = () if run_dir.exists() else (run_dir,)
    run_dir.mkdir(parents=True, exist_ok=True)
    numbers = [number for number, _ in _runs(run_dir, name)]
    number = max(numbers, default=0) + 1
    while True:
        try:
            path = run_dir / f"{name}-{number:03d}"
            path.mkdir()
            return RunFolder(path, (path, *made))
        except FileExistsError:  # another job of this name was quicker
            number += 1


def latest_run(run_dir: Path, name: str) -> RunFolder | None:
    runs = _runs(run_dir, name)
    return RunFolder(max(runs)[1]) if runs else None


def _runs(run_dir: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    found = [(pattern.fullmatch(p.name), p) for p in run_dir.iterdir()] if run_dir.is_dir() else []
    return [(int(match[1]), path) for match, path in found if match]


def find_run(text: str, run_dir: Path = Path("runs")) -> RunFolder:
    """The run that `text` means: a folder, a name below `run_dir`, or a job's name (its latest run)."""
    for path in (Path(text), run_dir / text):
        if (path / "status.json").exists() or (path / "settings.json").exists():
            return RunFolder(path)
    if (latest := latest_run(run_dir, text)) is not None:
        return latest
    known = [p.name for p in run_dir.iterdir()] if run_dir.is_dir() else []
    close = nearest(os.path.basename(text), known)
    hint = f"; did you mean {close!r}?" if close else f"; there is no such run below {run_dir}/"
    raise InputError(f"RUN: found {text!r}, expected a run's folder or name{hint}")


def choose_folder(run_dir: Path, name: str, resume: bool, run: str | None) -> RunFolder:
    """The run's folder: a new one, the one named, or on resume the latest of this job."""
    if run is not None and resume:
        return find_run(run, run_dir)
    if run is not None:
        folder = RunFolder(Path(run))
        if folder.settings.exists():
            raise InputError(f"--run: {run} holds a run already; go on with --resume, or name another folder")
        return folder
    latest = latest_run(run_dir, name) if resume else None
    if resume and latest is None:
        raise InputError(
            f"--resume: there is no run of {name!r} below {run_dir}/; start one without --resume"
        )
    return latest or new_run(run_dir, name)
