"""The run folder: where a run keeps its events, logs, checkpoints and state, and how one finds it again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from plait.core import locks
from plait.core.errors import InputError
from plait.core.files import expand_path, writing
from plait.core.names import nearest


class RunDir:
    """The paths of one run below `path`; `made` are the folders that were created for it, innermost first."""

    def __init__(self, path: Path, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self.made = made
        self._lock = path / ".lock"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.settings = path / "settings.json"
        self.job = path / "job.yaml"
        self.status = path / "status.json"
        self.result = path / "result.json"
        self.failure = path / "failure.txt"
        self.verified = path / "verified.json"
        self.control = path / ".control"

    def events(self, rank: int = 0) -> Path:
        return self.path / "events" / f"rank{rank}.jsonl"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock this folder for one supervisor; the system unlocks it however the process ends."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._lock.open("a+")
        with file:
            if not locks.acquire(file):
                raise InputError(f"{self.path}: this run is going on already; see: plait status {self.path}")
            file.truncate(0)
            file.write(
                json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": _born(os.getpid())})
            )
            file.flush()
            yield

    def holder(self) -> tuple[str, int] | None:
        """The host and process of the supervisor that holds this folder now, or None.

        The process is 0 where its number is not known yet.
        """
        try:
            with self._lock.open() as file:
                if not locks.is_held(file):
                    return None
                found = json.loads(file.read())
                host, pid, since = str(found["host"]), int(found["pid"]), found["since"]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OverflowError):
            return "", 0
        # A supervisor that has just begun may not have written its own number yet.
        is_old = host == socket.gethostname() and _born(pid) != since
        return host, 0 if is_old else pid

    @contextlib.contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        """Remove the folders that were made for this run, if they are empty, when the block raises."""
        try:
            yield
        except BaseException:
            self._remove_made()
            raise

    def is_trained(self) -> bool:
        """Whether anything here took training to make: a checkpoint, whole or not, or the event of a step."""
        kept = [*self.path.glob("checkpoints/*"), *self.path.glob("trials/*/checkpoints/*")]
        return bool(kept) or any(_has_steps(path) for path in self.path.glob("events/*.jsonl"))

    def remove_untrained(self, files: Iterable[Path]) -> None:
        """Take back what a refused launch wrote, `files` among it, unless something was trained.

        Only files that a launch makes are removed, one by one, and folders only where they are empty then.
        """
        if self.is_trained():
            return
        written = [*files, self.status, self.failure, self._lock, self.control]
        for pattern in ("logs/rank*.out", "logs/rank*.err", "events/rank*.jsonl", "tensorboard/events.*"):
            written += self.path.glob(pattern)
        for path in written:
            path.unlink(missing_ok=True)
        for name in ("logs", "events", "tensorboard", "checkpoints", "trials"):
            _remove_empty(self.path / name)
        self._remove_made()

    def _remove_made(self) -> None:
        for made in self.made:
            _remove_empty(made)


def _born(pid: int) -> float | None:
    """When the process with that number started; None where there is none."""
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        return psutil.Process(pid).create_time()
    return None


def _has_steps(events: Path) -> bool:
    try:
        with events.open(errors="replace") as file:
            return any('"kind":"step"' in line or '"kind":"operations"' in line for line in file)
    except OSError:
        return True


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not there, or something is in it
        folder.rmdir()


def new_run(run_dir: Path, name: str) -> RunDir:
    """A fresh folder `run_dir/name-NNN`, numbered after the last one."""
    made = () if run_dir.exists() else (run_dir,)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        numbers = [number for number, _ in _runs(run_dir, name)]
        number = max(numbers, default=0) + 1
        while True:
            try:
                path = run_dir / f"{name}-{number:03d}"
                path.mkdir()
                return RunDir(path, (path, *made))
            except FileExistsError:  # another job of this name was quicker
                number += 1
    except OSError as failure:
        raise InputError(
            f"run_dir: found {str(run_dir)!r}, but no folder can be made there: {failure.strerror}; set it "
            f"to a folder that you may write to"
        ) from None


def latest_run(run_dir: Path, name: str) -> RunDir | None:
    runs = _runs(run_dir, name)
    return RunDir(max(runs)[1]) if runs else None


def _runs(run_dir: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    found = [(pattern.fullmatch(p.name), p) for p in run_dir.iterdir()] if run_dir.is_dir() else []
    return [(int(match[1]), path) for match, path in found if match]


def find_run(text: str, run_dir: Path = Path("runs")) -> RunDir:
    """The run that `text` means: a folder, a name below `run_dir`, or a job's name (its latest run)."""
    text = expand_path(text, "RUN")
    for path in (Path(text), run_dir / text):
        if (path / "status.json").exists() or (path / "settings.json").exists():
            return RunDir(path)
    if (latest := latest_run(run_dir, text)) is not None:
        return latest
    known = [p.name for p in run_dir.iterdir()] if run_dir.is_dir() else []
    close = nearest(os.path.basename(text), known)
    hint = f"; did you mean {close!r}?" if close else f"; there is no such run below {run_dir}/"
    raise InputError(f"RUN: found {text!r}, expected a run's folder or name{hint}")


def choose_folder(run_dir: Path, name: str, resume: bool, run: str | None) -> RunDir:
    """The run's folder: a new one, the one named, or on resume the latest of this job."""
    if run is not None and resume:
        return find_run(run, run_dir)
    if run is not None:
        path = Path(expand_path(run, "--run"))
        folder = RunDir(path, () if path.exists() else (path,))
        if folder.settings.exists():
            raise InputError(f"--run: {run} holds a run already; go on with --resume, or name another folder")
        return folder
    latest = latest_run(run_dir, name) if resume else None
    if resume and latest is None:
        raise InputError(
            f"--resume: there is no run of {name!r} below {run_dir}/; start one without --resume"
        )
    return latest or new_run(run_dir, name)
