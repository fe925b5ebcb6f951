"""A run's status and failure files, read and checked: a crash or a full disk may have left them damaged."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from plait.core.artefact import read_json
from plait.core.errors import ArtefactError, PlaitError
from plait.core.shown import shortened, shown
from plait.launcher.run_dir import GOING_ON, RunDir
from plait.schema.hosts import LOCAL

# The beginning of the messages of failed runs; the path of a log or an agent's output follows.
_WORKER_FAILED = re.compile(r"worker \d+ on \S+ failed: ")
_AGENT_FAILED = re.compile(r"the agent on .* (ended|is still there|has shown no sign of life)")
_MOST_BYTES = 1_000_000
# Runs are looked for this many folders below the one that is listed.
_MOST_DEPTH = 3


def read_status(folder: RunDir) -> dict[str, Any]:
    """The run's status file, corrected by whether the supervisor and the workers are alive now.

    It is written once workers are started; before that a run that is locked by its supervisor is `starting`.
    """
    if not os.path.lexists(folder.status) and folder.holder() is not None:
        return {"state": "starting", "updated": folder.path.stat().st_mtime, "progress": {}, "workers": []}
    if not folder.status.is_file() and folder.status.exists():  # to open a pipe would wait for its writer
        raise ArtefactError(f"{folder.status}: no regular file; expected a status file")
    content = read_json(folder.status, "status")
    _check(content, folder)
    running = folder.holder() is not None
    if not running and content["state"] in GOING_ON:
        content["state"] = "died"
    for worker in content["workers"]:
        # The end of a worker on another host ends the run soon, so there the run's state is used.
        worker["alive"] = running and (worker["host"] != LOCAL or _is_alive(worker["pid"]))
    return content


def known_status(folder: RunDir) -> dict[str, Any]:
    """The run's status as `read_status` has it; if there is none, or a damaged one, its `state` says so."""
    try:
        return read_status(folder)
    except ArtefactError:
        state = "its status file is damaged" if folder.status.exists() else "never started"
    return {"state": state, "progress": {}, "workers": []}


def list_runs(run_dir: Path) -> list[dict[str, Any]]:
    """Every run below `run_dir` with its status, newest first; of one that cannot be read, the `error`."""
    rows = [_row(folder, run_dir) for folder in _folders(run_dir, _MOST_DEPTH)]
    return sorted(rows, key=lambda row: row["updated"], reverse=True)


def _folders(path: Path, depth: int) -> Iterator[RunDir]:
    """The runs below `path`; within a run none is looked for."""
    for entry in sorted(path.iterdir()):
        folder = RunDir(entry)
        if entry.is_symlink() or not entry.is_dir():
            continue
        # What cannot be looked into may be a run of another user.
        if not os.access(entry, os.R_OK | os.X_OK) or any(
            os.path.lexists(file) for file in (folder.record, folder.status)
        ):
            yield folder
        elif depth > 1:
            yield from _folders(entry, depth - 1)


def _row(folder: RunDir, run_dir: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"name": str(folder.path.relative_to(run_dir)), "run": str(folder.path)}
    try:
        if not folder.status.exists() and folder.holder() is None:
            return row | {"state": "never started", "updated": folder.path.stat().st_mtime}
        content = read_status(folder)
    except (PlaitError, OSError) as failure:
        return row | {"state": "unreadable", "error": str(failure), "updated": folder.path.stat().st_mtime}
    keys = ("state", "updated", "progress", "workers")
    return row | {key: content[key] for key in keys}


def _check(content: Mapping[str, Any], folder: RunDir) -> None:
    """Raise ArtefactError for the first wrong value in a damaged status file."""

    def expect(holds: bool, section: Mapping[str, Any], key: str, expected: str) -> None:
        if not holds:
            what = f"found {shown(section[key])}" if key in section else "missing"
            raise ArtefactError(
                f"{folder.status}: {key}: {what}, expected {expected}; the file is damaged, "
                f"so see {folder.logs} and {folder.events().parent} for how far the run came"
            )

    expect(isinstance(content.get("state"), str), content, "state", "text")
    expect(_is_number(content.get("updated")), content, "updated", "seconds")
    expect(isinstance(content.get("progress"), dict), content, "progress", "an object")
    expect(isinstance(content.get("workers"), list), content, "workers", "a list")
    progress = content["progress"]
    expect(not progress or _is_whole(progress.get("step")), progress, "step", "a whole number")
    # A stream of unknown length has no number of steps.
    unknown = "steps" in progress and progress["steps"] is None
    expect(not progress or unknown or _is_whole(progress.get("steps")), progress, "steps", "a whole number")
    is_sweep = "trials" in progress or "ended" in progress
    for key in ("trials", "ended"):
        expect(not is_sweep or _is_whole(progress.get(key)), progress, key, "a whole number")
    expect(isinstance(progress.get("failed", {}), dict), progress, "failed", "an object")
    for key in ("samples_per_s", "left_s"):
        expect(_is_number(progress.get(key, 0.0)), progress, key, "a number")
    for key in ("loss", *(key for key in progress if key.startswith("test_"))):
        value = progress.get(key)
        expect(value is None or _is_number(value, finite=False), progress, key, "a number or null")
    for worker in content["workers"]:
        expect(isinstance(worker, dict), content, "workers", "an object for each worker")
        for key in ("rank", "pid"):
            expect(_is_whole(worker.get(key)), worker, key, "a whole number")
        expect(isinstance(worker.get("host"), str), worker, "host", "text")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_number(value: Any, finite: bool = True) -> bool:
    if isinstance(value, float):
        return math.isfinite(value) or not finite
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # no valid pid
        return False
    except psutil.AccessDenied:
        return True


def read_cause(folder: RunDir) -> str | None:
    """The line of the run's failure file that says why it failed; None if there is no such file."""
    try:
        if not folder.failure.is_file():
            return None
        with folder.failure.open("rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    failed = [line for line in lines if _WORKER_FAILED.match(line)]
    gone = [line for line in lines if _AGENT_FAILED.match(line)]
    others = [line for line in lines if not line.startswith("its log: ")]
    # A worker's traceback, which may be long, comes before the message.
    chosen = failed[-1:] or gone[:1] or others[-1:]
    return shortened(chosen[0].strip(), 500) if chosen else None
