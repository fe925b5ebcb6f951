"""Agents on the nodes of a Slurm job, started by srun; and how a command is queued as such a job."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.core.errors import InputError, LaunchError
from plait.core.files import write_atomic
from plait.launcher.launchers import Launcher, Stream
from plait.launcher.launchers.local import open_stream
from plait.launcher.run_dir import RunKind, choose_folder, new_run
from plait.schema.hosts import Host
from plait.schema.job_settings import Job
from plait.schema.placement import HostAccess

# Set in a batch script that goes on by itself where it was, so that the job may be queued again.
REQUEUE = "PLAIT_REQUEUE"
ASK_S = 20.0
_SRUN = [
    "--nodes=1",
    "--ntasks=1",
    "--overlap",
    "--no-kill",
    "--unbuffered",
    "--kill-on-bad-exit",
    "--export=ALL",
]
# Of states such as DOWN*, IDLE+NOT_RESPONDING or ALLOCATED+DRAIN, which goes on with what it runs.
_GONE = re.compile(r"DOWN|FAIL|NOT_RESPONDING|POWERED_DOWN|UNKNOWN|\*")


class SlurmLauncher(Launcher):
    """The nodes of the Slurm job that this process runs in.

    Slurm announces the end by SIGTERM, or as `sbatch --signal` says, to the batch script or to the processes
    on all nodes.
    """

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self, access: HostAccess) -> None:
        self._access = access
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._ends_at: float | None = None
        if not self._job:
            raise InputError(
                "cluster.on: found slurm, but this is no Slurm job (SLURM_JOB_ID is not set): run it in "
                "salloc or a batch script, or add --submit, which queues it"
            )

        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else self._job
        if os.environ.get(REQUEUE) == "1":
            # Slurm does not do it where a job keeps its other nodes after the loss of this one.
            self.if_silent = ("scontrol", "requeue", job)

    def take_hosts(self, fewest: int, most: int, lost: Collection[str] = ()) -> tuple[Host, ...]:
        nodes = _ask("squeue", "-h", "-j", self._job, "-o", "%N")
        names = _ask("scontrol", "show", "hostnames", nodes).split()
        known = dict(
            _node(line) for line in _ask("scontrol", "show", "node", "-o", nodes).splitlines() if line
        )
        slots = self._access.slots or _gpus() or 1
        hosts = [
            Host(name, slots, _address(known[name]))
            for name in names
            if name in known and name not in lost and not _GONE.search(known[name]["State"])
        ]
        if len(hosts) < fewest:
            raise LaunchError(
                f"Slurm job {self._job} has {len(hosts)} nodes that can be used of {', '.join(names)}, "
                f"expected {fewest} at least (cluster.nodes)"
            )
        return tuple(hosts[:most])

    def start(self, host: Host, command: Sequence[str], environment: Mapping[str, str]) -> Stream:
        return open_stream([*self._srun(host), *command], environment)

    def reached_by(self, host: Host) -> str:
        return shlex.join(self._srun(host))

    def _srun(self, host: Host) -> list[str]:
        return ["srun", f"--jobid={self._job}", f"--nodelist={host.name}", *_SRUN]

    def notice(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def signalled(self, number: int) -> bool:
        if number not in self.signals:
            return False
        if self._ends_at is None:
            self._ends_at = time.monotonic() + self._access.grace_s
        return True

    def ask_again(self, announce: Callable[[], None]) -> None:
        """Queue the job again, unless it was cancelled or Slurm has done so itself."""
        with contextlib.suppress(LaunchError):
            if self.if_silent and _ask("squeue", "-h", "-j", self._job, "-o", "%T") == "RUNNING":
                announce()  # it may end this process, too
                _ask(*self.if_silent)


def _ask(*command: str) -> str:
    """What a command of Slurm prints; LaunchError if it fails."""
    if shutil.which(command[0]) is None:
        raise InputError(f"cluster.on: found slurm, but there is no command {command[0]} on this machine")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_S, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{shlex.join(command)} has not answered within {ASK_S:.0f} s") from None
    if done.returncode != 0:
        why = done.stderr.strip() or f"status {done.returncode}"
        raise LaunchError(f"{shlex.join(command)} failed: {why}")
    return done.stdout.strip()


def _node(line: str) -> tuple[str, dict[str, str]]:
    """The name and the fields of a node, as `scontrol show node -o` prints them."""
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    return fields["NodeName"], fields


def _address(node: Mapping[str, str]) -> str | None:
    """The address of a node if Slurm has one; otherwise its name is resolved on the node."""
    try:
        return str(ipaddress.IPv4Address(node.get("NodeAddr", "")))
    except ValueError:
        return None


def _gpus() -> int:
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if count.isdecimal() else 0


def submit(job: Job, arguments: Sequence[str], run: str | None, resume: bool) -> dict[str, str]:
    """Queue `plait` with these `arguments`, those of a command with --submit, as a batch job.

    The job goes on with the run if it is queued again. Returns its number and its files.
    """
    if job.engine != "slurm":
        raise InputError("--submit: found it without --on slurm; Slurm is the only queue that it knows")
    kind = RunKind(arguments[0])
    folder = choose_folder(Path(job.run_dir), job.name, resume, run, kind) or new_run(
        Path(job.run_dir), job.name
    )
    folder.make()
    path = folder.path.absolute()
    script, output = path / "slurm.sh", path / "slurm-%j.out"
    write_atomic(script, batch_script(job, kind, arguments, path))
    try:
        number = _ask("sbatch", "--parsable", str(script)).partition(";")[0]
    except LaunchError:
        script.unlink()
        folder.remove_made()
        raise
    return {
        "job": number,
        "run": str(folder.path),
        "script": str(script),
        "output": str(output).replace("%j", number),
    }


def batch_script(job: Job, kind: RunKind, arguments: Sequence[str], folder: Path) -> str:
    """The text of a batch script that runs the command in `folder`, or goes on with what is there."""
    fewest, most = job.node_range if job.cluster.nodes is not None else (1, 1)
    options: dict[str, Any] = {
        "job-name": job.name,
        "nodes": f"{fewest}-{most}" if fewest < most else fewest,
        "requeue": True,
        # A job that can do with fewer nodes keeps those that are left; others Slurm queues again.
        "no-kill": fewest < most,
        "open-mode": "append",
        "output": str(folder / "slurm-%j.out"),
        "signal": f"B:TERM@{max(1, round(job.cluster.grace_s))}",
        **job.cluster.options,
    }
    lines = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"
        for name, value in options.items()
        if value not in (None, False)
    ]
    first = [*_without(arguments, "--run", "--resume"), "--run", str(folder)]
    again = [*_without(arguments, "--run", "--resume", *_SETTLED[kind]), "--resume"]
    again += [str(folder)] if kind is RunKind.SWEEP else ["--run", str(folder)]
    plait = [sys.executable, "-P", "-m", "plait"]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"export {REQUEUE}=1",
            f"cd {shlex.quote(os.getcwd())} || exit 1",
            f"if [ -e {shlex.quote(str(folder / 'run.json'))} ]; then",
            f"  exec {shlex.join([*plait, *again])}",
            "fi",
            f"exec {shlex.join([*plait, *first])}",
            "",
        ]
    )


# Options of a command that are settled once its run has begun.
_SETTLED = {RunKind.TRAIN: (), RunKind.SWEEP: ("--over", "--plan", "--set")}


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """The arguments of a command without those of --submit and these; --set of `cluster` is kept."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        if word in ("--submit", "--json"):
            continue
        if name not in options:
            kept.append(word)
        elif not equals and (name != "--resume" or arguments[0] == RunKind.SWEEP.value):
            value = next(rest, "")
            if name == "--set" and value.startswith("cluster."):
                kept += [word, value]
    return kept
