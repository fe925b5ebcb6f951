"""The run folder: the events, logs, checkpoints and state of a run, and how to find it by name.

A run changes only files that it made: its record, `run.json`, holds the kind of the run and the names of its
files and folders. A folder that contains such names but no record is not used.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from plait.core import locks
from plait.core.artefact import load, text_of
from plait.core.codec import encode
from plait.core.errors import DiskError, InputError
from plait.core.files import expand_path, write_atomic, writing
from plait.core.names import nearest, user_folders
from plait.core.shown import listed

KIND, VERSION = "run", 1
# What a run makes in its folder.
FILES = (
    "job.yaml",
    "settings.json",
    "sweep.json",
    "status.json",
    "result.json",
    "failure.txt",
    "verified.json",
    "trials.csv",
    "curves.png",
    "sweep.html",
    "study.db",
    ".control",
    ".lock",
    ".stop",
)
FOLDERS = ("logs", "events", "tensorboard", "checkpoints", "trials", "failures", "objects", "adapter")
MOST_ATTEMPTS = 20
# Checkpoints that are being written.
UNFINISHED = ".step-*"

# The states of a run that has not ended.
GOING_ON = ("starting", "running", "stopping")


class RunKind(enum.Enum):
    """The kind of a run; a run of one kind is never resumed as the other."""

    TRAIN = "train"
    SWEEP = "sweep"

    @property
    def label(self) -> str:
        """The kind as messages name it."""
        return "a training run" if self is RunKind.TRAIN else "a sweep"

    def resume_command(self, folder: Path, job: object = "JOB") -> str:
        """The command that resumes the run in `folder`."""
        return f"plait {self.value} {job} --resume {'--run ' if self is RunKind.TRAIN else ''}{folder}"


@dataclass(frozen=True)
class RunRecord:
    """The contents of `run.json`. `entries` are the names in the folder that the run may write and remove.

    `modules` are the folders of the user's modules, `job` is the checksum of the job file as the run last
    wrote it, and `id` is unique.
    """

    kind: RunKind
    id: str
    entries: tuple[str, ...]
    modules: tuple[str, ...] = ()
    job: str | None = None


class RunDir:
    """The paths of one run below `path`; `made` are the folders that were created for it, innermost first."""

    def __init__(self, path: Path, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self.made = made
        self.record = path / "run.json"
        self._lock = path / ".lock"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.settings = path / "settings.json"
        self.sweep = path / "sweep.json"
        self.study = path / "study.db"
        self.sampler = path / "objects" / "sampler.pkl"
        self.job = path / "job.yaml"
        self.status = path / "status.json"
        self.result = path / "result.json"
        self.failure = path / "failure.txt"
        self.verified = path / "verified.json"
        self.control = path / ".control"
        # Exists once the user has asked the run to stop, which an engine does by a signal, too.
        self.stop_request = path / ".stop"

    @property
    def is_run(self) -> bool:
        """Whether the folder holds something of a run."""
        return any(file.exists() for file in (self.record, self.status, self.settings))

    def events(self, rank: int = 0) -> Path:
        return self.path / "events" / f"rank{rank}.jsonl"

    def read_record(self) -> RunRecord:
        """The run's record; InputError if it cannot be read."""
        return load(RunRecord, self.record, KIND, VERSION)

    def check_owner(self, advice: str) -> None:
        """Raise InputError for a run of another user, whose code would be executed."""
        for file in (self.settings, self.record, *self.path.glob("objects/*.pkl")):
            owner = file.stat().st_uid if file.exists() else 0
            if owner not in (0, os.geteuid()):
                raise InputError(
                    f"{file}: belongs to another user ({owner}), and to evaluate a run executes the code "
                    f"that it names, such as its model's; look at {self.settings} first, then {advice}"
                )

    def check_free(self) -> None:
        """Raise InputError if a new run in this folder would overwrite something."""
        if os.path.lexists(self.record):
            kind = self.read_record().kind
            raise InputError(
                f"--run: {self.path} holds {kind.label} already; go on with --resume "
                f"({kind.resume_command(self.path)}), or name another folder"
            )
        if taken := self._taken(()):
            raise InputError(
                f"--run: {self.path} is no run's folder, but has {listed(taken)}, which a run would write "
                f"over; name a new folder, such as {self.path / 'run'}"
            )

    def check_kind(self, kind: RunKind) -> RunRecord:
        """The record of the run in this folder; InputError if there is none of that kind."""
        if not self.record.exists():
            raise InputError(
                f"--resume: {self.path} holds no run that can go on: it has no {self.record.name}, which "
                f"every run begins with; start a new one without --resume"
            )
        record = self.read_record()
        if record.kind is not kind:
            raise InputError(
                f"--resume: {self.path} holds {record.kind.label}, expected {kind.label}; go on with it by "
                f"{record.kind.resume_command(self.path)}, or name another folder"
            )
        return record

    def _taken(self, own_entries: tuple[str, ...]) -> list[str]:
        """Names that a run needs and that exist already, without `own_entries`."""
        names = (*FILES, *FOLDERS)
        return [name for name in names if name not in own_entries and os.path.lexists(self.path / name)]

    def claim(self, kind: RunKind, resume: bool) -> RunRecord:
        """Make this the folder of a new run, or with `resume` check that it holds a run of that kind."""
        if resume:
            record = self.check_kind(kind)
            if taken := self._taken(record.entries):
                raise InputError(
                    f"--resume: {self.path} has {listed(taken)}, which its run did not make; move them away"
                )
            return record
        self.check_free()
        self.make()
        record = RunRecord(kind, uuid.uuid4().hex, (*FILES, *FOLDERS), tuple(user_folders()))
        try:
            # If two runs start here at once, mode "x" fails for one of them.
            with writing(self.record), self.record.open("x") as file:
                file.write(_text(record))
        except DiskError as failure:
            if failure.errno != errno.EEXIST:
                self.record.unlink(missing_ok=True)
            self.remove_made()
            raise
        return record

    def write_job(self, text: str) -> None:
        """Write the job file, unless the user has edited the existing one."""
        record = self.read_record()
        modules = dict.fromkeys([*record.modules, *user_folders()])
        record = replace(record, entries=(*FILES, *FOLDERS), modules=tuple(modules))
        if not self.job.exists() or _checksum(self.job.read_bytes()) == record.job:
            write_atomic(self.job, text, private=True)
            record = replace(record, job=_checksum(text.encode()))
        write_atomic(self.record, _text(record))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock this folder for one supervisor; the lock is released even if the process is killed."""
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
        """The host and pid of the supervisor that has locked this folder, or None.

        The pid is 0 if it is not known yet.
        """
        if not self._lock.is_file():
            return None
        try:
            with self._lock.open() as file:
                if not locks.is_held(file):
                    return None
                content = json.loads(file.read(4096))
                host, pid, since = str(content["host"]), int(content["pid"]), content["since"]
                # A supervisor that has just started may not have written its pid yet, and the file may
                # have been edited to name any process.
                is_here = host == socket.gethostname()
                is_other = is_here and (_born(pid) != since or not _has_open(pid, file.fileno()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OverflowError):
            return "", 0
        return host, 0 if is_other else pid

    def is_trained(self) -> bool:
        """Whether the folder contains results of training: a checkpoint, even incomplete, or a step event."""
        kept = [*self.path.glob("checkpoints/*"), *self.path.glob("trials/*/checkpoints/*")]
        return bool(kept) or any(_has_steps(path) for path in self.path.glob("events/*.jsonl"))

    def remove_untrained(self) -> None:
        """Remove what a refused launch wrote, unless something was trained.

        None of it existed when the folder was claimed. Files are removed one by one, and folders only if they
        are empty then.
        """
        if self.is_trained():
            return
        within = ("logs/*.out", "logs/*.err", "events/rank*.jsonl", "tensorboard/events.*", "objects/*.pkl")
        for pattern in (*FILES, self.record.name, *within):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        for name in FOLDERS:
            _remove_empty(self.path / name)
        self.remove_made()

    def make(self) -> None:
        """Create the folder and its missing parents."""
        self.made = self.made or _missing(self.path)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def remove_made(self) -> None:
        """Remove the folders that were created for this run, as far as they are empty."""
        for folder in self.made:
            _remove_empty(folder)
        self.made = ()

    def remove_unfinished(self) -> None:
        """Remove incomplete checkpoints; called while no worker runs."""
        for folder in (self.checkpoints, *self.path.glob("trials/*/checkpoints")):
            for path in folder.glob(UNFINISHED):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def _text(record: RunRecord) -> str:
    return text_of(encode(record), KIND, VERSION)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _born(pid: int) -> float | None:
    """When the process started; None if there is no such process."""
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        return psutil.Process(pid).create_time()
    return None


def _has_open(pid: int, descriptor: int) -> bool:
    """Whether that process has the file of `descriptor` open; True if this cannot be determined."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except PermissionError:  # another user's process, which no signal of ours reaches
        return True
    except OSError:
        return not os.path.isdir("/proc/self/fd")
    lock_file = os.fstat(descriptor)
    for number in numbers:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"{folder}/{number}"), lock_file):
                return True
    return False


def _has_steps(events: Path) -> bool:
    try:
        with events.open(errors="replace") as file:
            return any('"kind":"step"' in line or '"kind":"operations"' in line for line in file)
    except OSError:
        return True


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # missing or not empty
        folder.rmdir()


def _missing(path: Path) -> tuple[Path, ...]:
    """`path` and its parents that do not exist, innermost first."""
    return tuple(folder for folder in (path, *path.parents) if not os.path.lexists(folder))


def new_run(run_dir: Path, name: str) -> RunDir:
    """A new folder `run_dir/name-NNN`, numbered after the last one."""
    made, attempts = _missing(run_dir), 0
    try:
        number = max((number for number, _ in _runs(run_dir, name)), default=0) + 1
        while True:
            run_dir.mkdir(parents=True, exist_ok=True)
            path = run_dir / f"{name}-{number:03d}"
            try:
                path.mkdir()
                return RunDir(path, (path, *made))
            except FileExistsError:  # created by another job of this name in the meantime
                number += 1
            except FileNotFoundError:  # a refused job has just removed the empty parent folder
                attempts += 1
                if attempts == MOST_ATTEMPTS:
                    raise
    except OSError as failure:
        raise InputError(
            f"run_dir: found {str(run_dir)!r}, but no folder can be made there: {failure.strerror}; set it "
            f"to a folder that you may write to"
        ) from None


def latest_run(run_dir: Path, name: str, kind: RunKind | None = None) -> RunDir | None:
    """The newest run of a job; with `kind`, the newest of that kind that can be resumed."""
    for _, path in sorted(_runs(run_dir, name), reverse=True):
        if kind is None or _kind_of(path) is kind:
            return RunDir(path)
    return None


def _kind_of(path: Path) -> RunKind | None:
    """The kind of the run in `path`; None if its record cannot be read."""
    with contextlib.suppress(InputError):
        return RunDir(path).read_record().kind
    return None


def _runs(run_dir: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    matches = [(pattern.fullmatch(p.name), p) for p in run_dir.iterdir()] if run_dir.is_dir() else []
    return [(int(match[1]), path) for match, path in matches if match]


def find_run(text: str, run_dir: Path = Path("runs"), kind: RunKind | None = None) -> RunDir:
    """The run that `text` names: a folder, a name below `run_dir`, or a job's name (its latest run).

    With `kind`, a run of that kind that can be resumed.
    """
    if not text:
        raise InputError("RUN: found '', expected a run's folder or name; is a variable unset?")
    text = expand_path(text, "RUN")
    for path in (Path(text), run_dir / text):
        folder = RunDir(path)
        if folder.is_run:
            if kind is not None:
                folder.check_kind(kind)
            return folder
    if (latest := _latest(run_dir, text, kind)) is not None:
        return latest
    known = [p.name for p in run_dir.iterdir()] if run_dir.is_dir() else []
    close = nearest(os.path.basename(text), known)
    hint = f"; did you mean {close!r}?" if close else f"; there is no such run below {run_dir}/"
    raise InputError(f"RUN: found {text!r}, expected a run's folder or name{hint}")


def choose_folder(run_dir: Path, name: str, resume: bool, run: str | None, kind: RunKind) -> RunDir | None:
    """The folder named by `run`, or on resume the latest run of this job; None if a new one is to be created.

    The folder is checked now, before a job is measured, but nothing is written to it yet.
    """
    if run == "":
        key = "--resume" if resume else "--run"
        raise InputError(f"{key}: found '', expected a folder; is the variable that names it unset?")
    if resume:
        latest = find_run(run, run_dir, kind) if run is not None else _latest(run_dir, name, kind)
        if latest is None:
            raise InputError(
                f"--resume: there is no run of {name!r} below {run_dir}/; start one without --resume"
            )
        return latest
    if run is None:
        new_run(run_dir, name).remove_made()
        return None
    folder = RunDir(Path(expand_path(run, "--run")))
    folder.check_free()
    folder.make()
    folder.remove_made()
    return folder


def _latest(run_dir: Path, name: str, kind: RunKind | None) -> RunDir | None:
    """The latest run of a job; InputError if it has runs, but none of that kind."""
    latest = latest_run(run_dir, name, kind)
    if latest is None and kind is not None and (other := latest_run(run_dir, name)) is not None:
        other.check_kind(kind)
    return latest
