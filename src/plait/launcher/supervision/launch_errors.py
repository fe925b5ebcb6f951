"""How a launch ends if not with a result."""

from __future__ import annotations

from pathlib import Path

from plait.core.errors import InputError, LaunchError
from plait.launcher.messages import COORDINATOR, Failure, process_name


class WorkerError(LaunchError):
    """A worker failed: names the worker, its host and its log, and has its traceback."""

    def __init__(self, cause: Failure, logs: Path | None) -> None:
        self.rank = cause.rank
        self.traceback = cause.traceback
        self.exit_status = cause.exit_status
        if self.exit_status == InputError.exit_status:
            super().__init__(cause.summary)
        else:
            log = f"\nits log: {logs / process_name(cause.rank)}.err" if logs is not None else ""
            who = "the coordinator" if cause.rank == COORDINATOR else f"worker {cause.rank}"
            super().__init__(f"{who} on {cause.host} failed: {cause.summary}{log}")


class HostLostError(LaunchError):
    """Hosts were lost, and the job could not go on without them.

    `folder` is that of the run, whose newest checkpoint can be continued from.
    """

    def __init__(self, message: str, hosts: tuple[str, ...]) -> None:
        super().__init__(message)
        self.hosts = hosts
        self.folder: Path | None = None


class Interrupted(LaunchError):
    """The user stopped the job before its end."""

    exit_status = 130
