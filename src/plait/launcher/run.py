"""Launching a run: its folder, its state for `status` and `stop`, and its result. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from plait.core.codec import encode
from plait.core.errors import ArtefactError, DiskError, InputError, PlaitError
from plait.core.files import write_atomic
from plait.core.units import count_of
from plait.launcher.display import Display, WorkerState
from plait.launcher.messages import Launch, RunRequest
from plait.launcher.run_dir import RunDir, RunKind
from plait.launcher.supervision.launch_errors import HostLostError
from plait.launcher.supervisor import Supervisor
from plait.schema.placement import Placement
from plait.schema.results import RunResult
from plait.schema.settings import TrainSettings

STATUS_S = 0.5
# The modules that workers need to trace a model and split it into stages.
TRACING = (
    "torch._dynamo",
    "torch.export._trace",
    "sympy.tensor.tensor",
    "plait.training.stages.run_stages",
    "plait.training.engines.pipeline_member",
)


class Workers(Protocol):
    """The workers of a launch: a `Supervisor` that starts them, or processes that were started already."""

    warnings: list[str]

    def run(self, prepare: Callable[[], None]) -> dict[int, Any]:
        """The return value of the entry on the workers that have one, by rank.

        `prepare` is called once all of them have accepted the job, before any trains.
        """

    def request_control(self, request: Any) -> Any:
        """Handle a request to change the workers of an elastic job."""


StartWorkers = Callable[[Launch, Display], Workers]


class StatusFile(Display):
    """Keeps the run's status file up to date and forwards all calls to the display.

    Neither a full disk nor a closed terminal ends a run. `on_training` is called once, at the first progress
    report of the workers.
    """

    def __init__(self, folder: RunDir, display: Display, on_training: Callable[[], None]) -> None:
        self._folder = folder
        self._display = display
        self._on_training = on_training
        self._written = 0.0
        self.is_training = False
        self._content: dict[str, Any] = {
            "state": "starting",
            "pid": os.getpid(),
            "started": time.time(),
            "workers": [],
            "progress": {},
        }

    def write(self, **changes: Any) -> None:
        self._content |= {"updated": time.time(), **changes}
        self._written = time.monotonic()
        with contextlib.suppress(DiskError):
            write_atomic(self._folder.status, json.dumps(self._content))

    def finish(self, result: Mapping[str, Any]) -> None:
        progress = dict(self._content["progress"])
        if "trials" not in progress:  # the steps of a sweep are those of all its trials
            progress |= {"step": result["step"], "steps": result["steps"]}
        progress.pop("left_s", None)
        self.write(state=result["reason"], progress=progress)

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        is_first = not self._content["workers"]
        self.write(state="running", workers=encode(workers))
        hosts = ", ".join(sorted({worker.host for worker in workers}))
        with contextlib.suppress(OSError):
            self._display.printed(f"{self._folder.path}: {count_of(len(workers), 'worker')} on {hosts}")
            self._display.started(workers)
            if is_first and self._content["progress"]:
                self._display.progressed(self._content["progress"])

    def progressed(self, progress: Mapping[str, Any]) -> None:
        if not self.is_training:
            self.is_training = True
            self._on_training()
        self._content["progress"] = dict(progress)
        if time.monotonic() - self._written >= STATUS_S:
            self.write()
        # The display receives the workers first; one may report progress while another is starting.
        if self._content["workers"]:
            with contextlib.suppress(OSError):
                self._display.progressed(progress)

    def printed(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._display.printed(line)

    def wrote(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._display.wrote(line)

    def stopping(self) -> None:
        if self._content["workers"]:
            self.write(state="stopping")
        with contextlib.suppress(OSError):
            self._display.stopping()


def launch(
    settings: TrainSettings,
    placement: Placement,
    folder: RunDir,
    display: Display,
    *,
    resume: bool = False,
    job_text: str = "",
    start: StartWorkers = Supervisor,
    objects: Mapping[str, bytes] = MappingProxyType({}),
) -> RunResult:
    """Run `settings` to the end on the workers of `placement` and return the result.

    The folder is locked during the run, and unchanged if the settings are refused. `job_text` is written to
    it, and so are `objects`, which are what its files must hold before workers start.
    """
    content = encode(settings)
    files = {folder.settings: json.dumps(content, indent=1)}

    def finish(result: dict[str, Any]) -> dict[str, Any]:
        earlier = _earlier_result(folder, result) if resume else None
        if earlier is None:
            return result
        message = (
            f"the run had already ended, at step {earlier['step']}: nothing was trained; to train more, "
            f"raise epochs or steps, such as --set steps={2 * earlier['step']}"
        )
        display.printed(f"warning: {message}")
        return {**earlier, "warnings": [*earlier["warnings"], message]}

    run = LaunchedRun(RunKind.TRAIN, folder, display, resume, files, job_text, start, objects)
    result = run.supervise("plait.training.worker", content, placement, tracing_modules(settings), finish)
    return replace(RunResult.of_plain(result, "result"), run=str(folder.path))


def tracing_modules(settings: TrainSettings) -> tuple[str, ...]:
    """The modules to preload for tracing, if the run splits its model into stages; otherwise none.

    They take longer to import than most of torch, and a worker that runs the whole model does not need them.
    """
    return TRACING if settings.as_run().in_stages else ()


@dataclass(eq=False)
class LaunchedRun:
    """One launch in its run folder: writes the files of the run, and removes them if it is refused.

    `files` are the texts of the settings files. A new run writes them before any worker starts, a resumed one
    once the workers train: until then they may refuse. `objects` are files that workers need to decide.
    """

    kind: RunKind
    folder: RunDir
    display: Display
    resume: bool
    files: Mapping[Path, str]
    job_text: str
    start: StartWorkers = Supervisor
    objects: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._record = self.folder.claim(self.kind, self.resume)
        self._status = StatusFile(self.folder, self.display, self._write_files)
        self._before = self.folder.status.read_bytes() if self.folder.status.exists() else None
        self._added = [path for name in self.objects if not (path := self.folder.path / name).exists()]

    def supervise(
        self,
        module: str,
        settings: Mapping[str, Any],
        placement: Placement,
        preload: tuple[str, ...],
        finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda result: result,
        coordinator: str | None = None,
    ) -> dict[str, Any]:
        """Run the module's function for this kind of run on all workers, after its `check_request` succeeds.

        `finish` may change the return value of rank 0 or the coordinator; `preload` and `coordinator` are as
        in `Launch`.
        """
        path, logs = self.folder.path.absolute(), self.folder.logs.absolute()
        workers = placement.workers if placement.elastic is None else None
        request = RunRequest(folder=path, resume=self.resume, run=self._record.id, workers=workers)
        argument = {"settings": settings, **encode(request)}
        entry, check = f"{module}:{self.kind.value}", f"{module}:check_request"
        with self.folder.lock():
            return self._run(Launch(placement, entry, argument, logs, check, preload, coordinator), finish)

    def _run(self, task: Launch, finish: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        folder = self.folder
        # Killed workers may leave some, in an earlier run or in this one.
        folder.remove_unfinished()
        folder.stop_request.unlink(missing_ok=True)
        try:
            for name, content in self.objects.items():
                write_atomic(folder.path / name, content, private=True)
            workers = self.start(task, self._status)
            try:
                with controlled(workers, task.placement, folder):
                    results = workers.run(self._prepare)
                # The coordinator has the lowest number; otherwise the first remaining worker has the record.
                result = finish(results[min(results)])
            finally:
                folder.remove_unfinished()
            result["warnings"] = [*dict.fromkeys([*result.get("warnings", ()), *workers.warnings])]
            write_atomic(folder.result, json.dumps(result, indent=1))
            folder.failure.unlink(missing_ok=True)
            self._status.finish(result)
            return result
        except BaseException as failure:
            if self._is_refused(failure):
                self._restore_folder()
            else:
                self._record_failure(failure)
            raise

    def _prepare(self) -> None:
        if not self.resume:
            self._write_files()
        self._status.write()

    def _write_files(self) -> None:
        for path, text in self.files.items():
            write_atomic(path, text)
        if self.job_text:
            self.folder.write_job(self.job_text)

    def _is_refused(self, failure: BaseException) -> bool:
        """Whether the input is wrong and nothing was trained, or nothing was started at all."""
        wrong_input = isinstance(failure, PlaitError) and failure.exit_status == InputError.exit_status
        if self._status.is_training:
            if isinstance(failure, PlaitError) and wrong_input:
                # The input was accepted at the start; an error later means that the run failed.
                failure.exit_status = PlaitError.exit_status
            return False
        never_started = not self.folder.status.exists() or self.folder.status.read_bytes() == self._before
        return never_started or wrong_input

    def _restore_folder(self) -> None:
        """Restore the folder: a resumed run keeps its old status, and a new one is removed."""
        if self.resume:
            if self._before is not None:
                write_atomic(self.folder.status, self._before)
            for path in self._added:
                path.unlink(missing_ok=True)
        else:
            self.folder.remove_untrained()

    def _record_failure(self, failure: BaseException) -> None:
        if isinstance(failure, HostLostError):
            failure.folder = self.folder.path
        self._status.write(state="failed")
        with contextlib.suppress(DiskError):
            write_atomic(self.folder.failure, f"{getattr(failure, 'traceback', '')}{failure}\n")


def controlled(
    workers: Workers, placement: Placement, folder: RunDir
) -> contextlib.AbstractContextManager[None]:
    """Serve the control endpoint during an elastic job; does nothing for other jobs."""
    if placement.elastic is None:
        return contextlib.nullcontext()
    from plait.launcher.control import serving  # imports an HTTP server

    return serving(folder, placement.elastic.control, workers.request_control)


def _earlier_result(folder: RunDir, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The earlier result of a resumed run that had no step left to do; None otherwise."""
    if result["train_loss"] is not None or not folder.result.exists():
        return None
    try:
        earlier = RunResult.of_plain(json.loads(folder.result.read_text()))
    except (OSError, ValueError, ArtefactError):
        return None
    return earlier.to_dict() if earlier.step == result["step"] else None
