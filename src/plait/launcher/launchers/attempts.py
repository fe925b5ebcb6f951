"""A run on the hosts that a launcher provides; when hosts are lost, it goes on from its newest checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from plait.core.errors import LaunchError
from plait.launcher.display import Display
from plait.launcher.launchers import Launcher
from plait.launcher.launchers.choose import launcher_of_job
from plait.launcher.run_dir import RunDir
from plait.launcher.supervision.launch_errors import HostLostError
from plait.schema.hosts import Host
from plait.schema.job_checks import check_combinations
from plait.schema.job_settings import Job


class Ended(Protocol):
    """What a run came to; `reason` is `stopped` if it was asked to stop, and `run` is its folder."""

    @property
    def reason(self) -> str: ...
    @property
    def run(self) -> str: ...


T = TypeVar("T", bound=Ended)


def run_on_hosts(job: Job, display: Display, run: Callable[[Job, Launcher, Path | None], T]) -> T:
    """Call `run` with the job on its hosts; again after hosts were lost, with the folder to go on in.

    At most `cluster.restarts` times without progress. If the engine takes the hosts away, or too few are
    left, it is asked to start this command again.
    """
    if job.engine == "local":
        _hint_at_slurm(display)
    launcher = launcher_of_job(job)
    fewest, most = job.node_range
    folder: Path | None = None
    left, furthest, lost = job.cluster.restarts, -1, set[str]()
    hosts = launcher.take_hosts(fewest, most)
    try:
        while True:
            here = replace(job, taken=hosts)
            check_combinations(here)
            try:
                result = run(here, launcher, folder)
                if result.reason != "stopped" or launcher.notice() is None:
                    return result
                stopped = RunDir(Path(result.run))
                if not launcher.has_others or stopped.stop_request.exists():
                    _ask_again(launcher, display, stopped)
                    return result
                launcher.give_back(hosts)
                try:
                    hosts = launcher.take_hosts(fewest, most)
                except LaunchError as missing:
                    display.printed(f"warning: {missing}")
                    return result
                folder = stopped.path
                display.printed(f"going on from the checkpoint on {_names(hosts)}")
            except HostLostError as failure:
                folder = failure.folder or folder
                step = _step_of(folder)
                if step > furthest:
                    left, furthest = job.cluster.restarts, step
                lost |= {*failure.hosts}
                if not hosts or folder is None or step < 0:
                    raise
                if launcher.notice() is not None and not launcher.has_others:
                    raise
                if left == 0:
                    failure.args = (f"{failure}; it came no further in {job.cluster.restarts} restarts",)
                    raise
                left -= 1
                launcher.give_back(hosts)
                try:
                    hosts = launcher.take_hosts(fewest, most, lost)
                except LaunchError as missing:
                    _ask_again(launcher, display, RunDir(folder))
                    failure.args = (f"{failure}; {missing}",)
                    raise failure from None
                why = str(failure).partition(";")[0]
                display.printed(f"warning: {why}; going on from the newest checkpoint on {_names(hosts)}")
    finally:
        launcher.give_back(hosts)


@contextlib.contextmanager
def on_hosts(job: Job) -> Iterator[Job]:
    """The job on its hosts, for one measurement on them."""
    launcher = launcher_of_job(job)
    hosts = launcher.take_hosts(*job.node_range)
    try:
        yield replace(job, taken=hosts)
    finally:
        launcher.give_back(hosts)


def _ask_again(launcher: Launcher, display: Display, folder: RunDir) -> None:
    """Have the engine start the command again, unless the user has stopped the run."""
    if not folder.stop_request.exists():
        message = f"{folder.path}: queued again; it goes on from the newest checkpoint"
        launcher.ask_again(lambda: display.printed(message))


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts)


def _step_of(folder: Path | None) -> int:
    """The last step that the run reported; -1 if it has not begun."""
    if folder is None:
        return -1
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(RunDir(folder).status.read_text())["progress"]["step"])
    return -1


def _hint_at_slurm(display: Display) -> None:
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if "SLURM_JOB_ID" in os.environ and nodes.isdecimal() and int(nodes) > 1:
        display.printed(f"note: this runs on one of the {nodes} nodes of a Slurm job; --on slurm uses all")
