"""The run folder: where a run keeps its events, logs, checkpoints and state, and how one finds it again.

A run touches nothing but what it made: its record, `run.json`, says what kind of run the folder is of and
which of its entries are the run's. A folder that has such entries already, and no record, is left alone.
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
from plait.core.names import nearest, own_folders
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
    ".control",
    ".lock",
)
FOLDERS = ("logs", "events", "tensorboard", "checkpoints", "trials", "failures")
MOST_ATTEMPTS = 20
# Checkpoints that are being written.
UNFINISHED = ".step-*"


class RunKind(enum.Enum):
    """What a folder is of; the one never goes on in a folder of the other."""

    TRAIN = "train"
    SWEEP = "sweep"

    @property
    def words(self) -> str:
        return "a training run" if self is RunKind.TRAIN else "a sweep"

    def how_to_go_on(self, folder: Path, job: object = "JOB") -> str:
        """The command that goes on with the run in `folder`."""
        return f"plait {self.value} {job} --resume {'--run ' if self is RunKind.TRAIN else ''}{folder}"


@dataclass(frozen=True)
class RunRecord:
    """Whose folder it is. `entries` are the names in it that the run may write and remove.

    `modules` are the folders that the run's own modules were found in, `job` is the checksum of the job file
    as the run last wrote it, and `id` is another one for each run.
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
        self.job = path / "job.yaml"
        self.status = path / "status.json"
        self.result = path / "result.json"
        self.failure = path / "failure.txt"
        self.verified = path / "verified.json"
        self.control = path / ".control"

    def events(self, rank: int = 0) -> Path:
        return self.path / "events" / f"rank{rank}.jsonl"

    def read_record(self) -> RunRecord:
        """The run's record; InputError where there is none that can be read."""
        return load(RunRecord, self.record, KIND, VERSION)

    def check_free(self) -> None:
        """Refuse a folder in which a new run would write over something."""
        if os.path.lexists(self.record):
            kind = self.read_record().kind
            raise InputError(
                f"--run: {self.path} holds {kind.words} already; go on with --resume "
                f"({kind.how_to_go_on(self.path)}), or name another folder"
            )
        if taken := self._taken(()):
            raise InputError(
                f"--run: {self.path} is no run's folder, but has {listed(taken)}, which a run would write "
                f"over; name a new folder, such as {self.path / 'run'}"
            )

    def check_kind(self, kind: RunKind) -> RunRecord:
        """The record of the run of that kind that is here; a folder of anything else is refused."""
        if not self.record.exists():
            raise InputError(
                f"--resume: {self.path} holds no run that can go on: it has no {self.record.name}, which "
                f"every run begins with; start a new one without --resume"
            )
        found = self.read_record()
        if found.kind is not kind:
            raise InputError(
                f"--resume: {self.path} holds {found.kind.words}, expected {kind.words}; go on with it by "
                f"{found.kind.how_to_go_on(self.path)}, or name another folder"
            )
        return found

    def _taken(self, own: tuple[str, ...]) -> list[str]:
        """Names that a run needs and that something else has."""
        names = (*FILES, *FOLDERS)
        return [name for name in names if name not in own and os.path.lexists(self.path / name)]

    def claim(self, kind: RunKind, resume: bool) -> RunRecord:
        """Make this the folder of a new run, or find the run that is to go on; refuses any other folder."""
        if resume:
            record = self.check_kind(kind)
            if taken := self._taken(record.entries):
                raise InputError(
                    f"--resume: {self.path} has {listed(taken)}, which its run did not make; move them away"
                )
            return record
        self.check_free()
        self.make()
        record = RunRecord(kind, uuid.uuid4().hex, (*FILES, *FOLDERS), tuple(own_folders()))
        try:
            # Of two that begin here at once, one finds it there.
            with writing(self.record), self.record.open("x") as file:
                file.write(_text(record))
        except DiskError as failure:
            if failure.errno != errno.EEXIST:
                self.record.unlink(missing_ok=True)
            self.remove_made()
            raise
        return record

    def write_job(self, text: str) -> None:
        """Keep the job as a file of the run's, unless a person has changed the one that is there."""
        record = self.read_record()
        modules = dict.fromkeys([*record.modules, *own_folders()])
        record = replace(record, entries=(*FILES, *FOLDERS), modules=tuple(modules))
        if not self.job.exists() or _checksum(self.job.read_bytes()) == record.job:
            write_atomic(self.job, text, private=True)
            record = replace(record, job=_checksum(text.encode()))
        write_atomic(self.record, _text(record))

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
                found = json.loads(file.read(4096))
                host, pid, since = str(found["host"]), int(found["pid"]), found["since"]
                # A supervisor that has just begun may not have written its own number yet; and whoever
                # may write the file could have named any process.
                is_here = host == socket.gethostname()
                is_other = is_here and (_born(pid) != since or not _has_open(pid, file.fileno()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OverflowError):
            return "", 0
        return host, 0 if is_other else pid

    def is_trained(self) -> bool:
        """Whether anything here took training to make: a checkpoint, whole or not, or the event of a step."""
        kept = [*self.path.glob("checkpoints/*"), *self.path.glob("trials/*/checkpoints/*")]
        return bool(kept) or any(_has_steps(path) for path in self.path.glob("events/*.jsonl"))

    def remove_untrained(self) -> None:
        """Take back what a refused launch wrote, unless something was trained.

        None of it was there when the folder was claimed. Files are removed one by one, and folders only where
        they are empty then.
        """
        if self.is_trained():
            return
        within = ("logs/rank*.out", "logs/rank*.err", "events/rank*.jsonl", "tensorboard/events.*")
        for pattern in (*FILES, self.record.name, *within):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        for name in FOLDERS:
            _remove_empty(self.path / name)
        self.remove_made()

    def make(self) -> None:
        """Make the folder, and those above it that are missing."""
        self.made = self.made or _missing(self.path)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def remove_made(self) -> None:
        """Remove what was made for this run, as far as nothing is in it."""
        for folder in self.made:
            _remove_empty(folder)
        self.made = ()

    def remove_unfinished(self) -> None:
        """Remove checkpoints that were not written to their end; while no worker runs."""
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
    """When the process with that number started; None where there is none."""
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        return psutil.Process(pid).create_time()
    return None


def _has_open(pid: int, descriptor: int) -> bool:
    """Whether that process has the file open that `descriptor` is of, as far as this one can know."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except PermissionError:  # another user's process, which no signal of ours reaches
        return True
    except OSError:
        return not os.path.isdir("/proc/self/fd")
    own = os.fstat(descriptor)
    for number in numbers:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"{folder}/{number}"), own):
                return True
    return False


def _has_steps(events: Path) -> bool:
    try:
        with events.open(errors="replace") as file:
            return any('"kind":"step"' in line or '"kind":"operations"' in line for line in file)
    except OSError:
        return True


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not there, or something is in it
        folder.rmdir()


def _missing(path: Path) -> tuple[Path, ...]:
    """`path` and the folders above it, as far as they are not there."""
    return tuple(folder for folder in (path, *path.parents) if not os.path.lexists(folder))


def new_run(run_dir: Path, name: str) -> RunDir:
    """A fresh folder `run_dir/name-NNN`, numbered after the last one."""
    made, attempts = _missing(run_dir), 0
    try:
        number = max((number for number, _ in _runs(run_dir, name)), default=0) + 1
        while True:
            run_dir.mkdir(parents=True, exist_ok=True)
            path = run_dir / f"{name}-{number:03d}"
            try:
                path.mkdir()
                return RunDir(path, (path, *made))
            except FileExistsError:  # another job of this name was quicker
                number += 1
            except FileNotFoundError:  # one that was refused has just removed the empty folder above
                attempts += 1
                if attempts == MOST_ATTEMPTS:
                    raise
    except OSError as failure:
        raise InputError(
            f"run_dir: found {str(run_dir)!r}, but no folder can be made there: {failure.strerror}; set it "
            f"to a folder that you may write to"
        ) from None


def latest_run(run_dir: Path, name: str, kind: RunKind | None = None) -> RunDir | None:
    """The newest run of a job; with `kind`, of those of that kind that can go on."""
    for _, path in sorted(_runs(run_dir, name), reverse=True):
        if kind is None or _kind_of(path) is kind:
            return RunDir(path)
    return None


def _kind_of(path: Path) -> RunKind | None:
    """What the folder is of, where its record can be read."""
    with contextlib.suppress(InputError):
        return RunDir(path).read_record().kind
    return None


def _runs(run_dir: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    found = [(pattern.fullmatch(p.name), p) for p in run_dir.iterdir()] if run_dir.is_dir() else []
    return [(int(match[1]), path) for match, path in found if match]


def find_run(text: str, run_dir: Path = Path("runs"), kind: RunKind | None = None) -> RunDir:
    """The run that `text` means: a folder, a name below `run_dir`, or a job's name (its latest run).

    With `kind`, one of that kind that can go on.
    """
    if not text:
        raise InputError("RUN: found '', expected a run's folder or name; is a variable unset?")
    text = expand_path(text, "RUN")
    for path in (Path(text), run_dir / text):
        folder = RunDir(path)
        if any(file.exists() for file in (folder.record, folder.status, folder.settings)):
            if kind is not None:
                folder.check_kind(kind)
            return folder
    if (latest := latest_run(run_dir, text, kind)) is not None:
        return latest
    if kind is not None and (other := latest_run(run_dir, text)) is not None:
        other.check_kind(kind)
    known = [p.name for p in run_dir.iterdir()] if run_dir.is_dir() else []
    close = nearest(os.path.basename(text), known)
    hint = f"; did you mean {close!r}?" if close else f"; there is no such run below {run_dir}/"
    raise InputError(f"RUN: found {text!r}, expected a run's folder or name{hint}")


def choose_folder(run_dir: Path, name: str, resume: bool, run: str | None, kind: RunKind) -> RunDir | None:
    """The folder named by `run`, or on resume the latest run of this job; None where a new one is to be made.

    What is wrong with the folder is said now, before a job is measured; but nothing is left in it yet.
    """
    if run == "":
        key = "--resume" if resume else "--run"
        raise InputError(f"{key}: found '', expected a folder; is the variable that names it unset?")
    if resume:
        return find_run(run, run_dir, kind) if run is not None else _latest(run_dir, name, kind)
    if run is None:
        new_run(run_dir, name).remove_made()
        return None
    folder = RunDir(Path(expand_path(run, "--run")))
    folder.check_free()
    folder.make()
    folder.remove_made()
    return folder


def _latest(run_dir: Path, name: str, kind: RunKind) -> RunDir:
    if (found := latest_run(run_dir, name, kind)) is not None:
        return found
    if (other := latest_run(run_dir, name)) is not None:
        other.check_kind(kind)
    raise InputError(f"--resume: there is no run of {name!r} below {run_dir}/; start one without --resume")
