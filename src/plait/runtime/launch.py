"""Launching a run: its folder, its state for `status` and `stop`, and its result. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from plait.cluster.hosts import LOCAL, Host
from plait.cluster.supervisor import Launch, Supervisor, WorkerState
from plait.core.codec import encode
from plait.core.errors import InputError, PlaitError
from plait.core.files import write_atomic
from plait.runtime.folder import RunFolder
from plait.runtime.settings import TrainSettings

STATUS_S = 0.5


@dataclass(frozen=True)
class Placement:
    """Where workers run and how their hosts are reached."""

    hosts: tuple[Host, ...] = (Host(LOCAL, 1),)
    shell: str = "ssh {host}"
    python: str = sys.executable
    nic: str | None = None
    threads: int | None = None
    timeout_s: float = 300.0
    link_timeout_s: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def launch(
        self,
        entry: str,
        settings: Mapping[str, Any],
        logs: Path | None,
        check: str | None = None,
        preload: tuple[str, ...] = (),
    ) -> Launch:
        """The launch of the function `entry` on these workers."""
        return Launch(entry=entry, settings=settings, logs=logs, check=check, preload=preload, **vars(self))


class Display(Protocol):
    """Who shows a run to a person."""

    def started(self, folder: RunFolder, workers: tuple[WorkerState, ...]) -> None: ...
    def progressed(self, progress: Mapping[str, Any]) -> None: ...
    def printed(self, line: str) -> None: ...
    def stopping(self) -> None: ...


class Silent:
    """A display that shows nothing."""

    def started(self, folder: RunFolder, workers: tuple[WorkerState, ...]) -> None:
        pass

    def progressed(self, progress: Mapping[str, Any]) -> None:
        pass

    def printed(self, line: str) -> None:
        pass

    def stopping(self) -> None:
        pass


class _Status:
    """Keeps the run's status file up to date and passes everything on to the display."""

    def __init__(self, folder: RunFolder, display: Display) -> None:
        self._folder = folder
        self._display = display
        self._written = 0.0
        self._content: dict[str, Any] = {
            "state": "starting",
            "pid": os.getpid(),
            "started": time.time(),
            "workers": [],
            "progress": {},
        }

    def write(self, **changes: Any) -> None:
        self._content |= {"updated": time.time(), **changes}
        write_atomic(self._folder.status, json.dumps(self._content))
        self._written = time.monotonic()

    def finish(self, result: Mapping[str, Any]) -> None:
        progress = {**self._content["progress"], "step": result["step"]}
        progress.pop("left_s", None)
        self.write(state=result["reason"], progress=progress)

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self.write(state="running", workers=encode(workers))
        self._display.started(self._folder, workers)

    def progressed(self, progress: Mapping[str, Any]) -> None:
        self._content["progress"] = dict(progress)
        if time.monotonic() - self._written >= STATUS_S:
            self.write()
        self._display.progressed(progress)

    def printed(self, line: str) -> None:
        self._display.printed(line)

    def stopping(self) -> None:
        if self._content["workers"]:
            self.write(state="stopping")
        self._display.stopping()


def launch(
    settings: TrainSettings,
    placement: Placement,
    folder: RunFolder,
    display: Display,
    *,
    resume: bool = False,
    job_text: str = "",
) -> dict[str, Any]:
    """Run `settings` to its end on the workers of `placement`; rank 0's result.

    The folder is held while the run goes on, and left as it was when the settings are refused.
    """
    files = {folder.settings: json.dumps(encode(settings), indent=1)}
    if job_text:
        files[folder.job] = job_text

    def finish(result: dict[str, Any]) -> dict[str, Any]:
        return (_earlier_result(folder, result) if resume else None) or result

    return launch_entry(
        "plait.runtime.worker", "train", settings, placement, folder, display, resume, files, finish
    )


def launch_entry(
    module: str,
    entry: str,
    settings: Any,
    placement: Placement,
    folder: RunFolder,
    display: Display,
    resume: bool,
    files: Mapping[Path, str],
    finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda result: result,
) -> dict[str, Any]:
    """Run a module's `entry` on all workers in a run folder, once its `check_order` accepts the order.

    `files` are written before any worker starts; `finish` may change what rank 0 returned.
    """
    made = folder.made if folder.path.exists() else (folder.path,)
    lock = folder.lock()
    status = _Status(folder, display)
    order = {"settings": encode(settings), "folder": str(folder.path.absolute()), "resume": resume}
    task = placement.launch(
        f"{module}:{entry}",
        order,
        folder.logs.absolute(),
        check=f"{module}:check_order",
        # Torch's optimizers load it, and it takes longer than torch itself.
        preload=("torch._dynamo",),
    )
    supervisor = Supervisor(task, status)
    prepared = False

    def prepare() -> None:
        nonlocal prepared
        for path, text in files.items():
            write_atomic(path, text)
        status.write()
        prepared = True

    try:
        result: dict[str, Any] = finish(_of_lowest(supervisor.run(prepare)))
        write_atomic(folder.result, json.dumps(result, indent=1))
        status.finish(result)
        return result
    except BaseException as failure:
        wrong_input = isinstance(failure, PlaitError) and failure.exit_status == InputError.exit_status
        if prepared and wrong_input and folder.made:
            # The workers found that the job cannot run: a new run leaves nothing behind.
            shutil.rmtree(folder.path)
            _remove(folder.path / ".lock", folder.made[1:])
        elif prepared:
            status.write(state="failed")
            write_atomic(folder.failure, f"{getattr(failure, 'traceback', '')}{failure}\n")
        else:
            _remove(folder.path / ".lock", made)
        raise
    finally:
        lock.close()


def _of_lowest(results: Mapping[int, Any]) -> Any:
    """What the lowest rank returned of those that were not lost: it kept the record."""
    return results[min(results)]


def _earlier_result(folder: RunFolder, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of the run as it ended before, where going on had nothing left to do."""
    if result["train_loss"] is not None or not folder.result.exists():
        return None
    earlier: dict[str, Any] = json.loads(folder.result.read_text())
    return earlier if earlier.get("step") == result["step"] else None


def _remove(lock: Path, made: tuple[Path, ...]) -> None:
    """Take back what a refused launch made."""
    lock.unlink(missing_ok=True)
    for folder in made:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
