"""`plait status`, `stop`, `resize` and `evaluate`: commands for an existing run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.status_file import known_status, list_runs, read_cause, read_status
from plait.cli.train import JsonFlag
from plait.core.errors import InputError, PlaitError
from plait.core.logs import show_logs
from plait.core.names import searching
from plait.core.shown import printable
from plait.core.units import count_of, show_seconds
from plait.launcher.run_dir import GOING_ON, RunDir, RunKind, find_run
from plait.schema.results import show_metrics

RunArgument = Annotated[
    str, typer.Argument(help="A run's folder, its name, or a job's name.", show_default=False)
]
RunsFolder = Annotated[Path, typer.Option(help="Where runs are looked up by name.")]

LONGEST_S = 1e6


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run's folder, its name, or a job's name; without it, all runs are listed.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunsFolder = Path("runs"),
    json_: JsonFlag = False,
) -> None:
    """Show which workers are alive, the step, samples/s and time left of a run; or list all runs.

    Example: plait status runs/digits-001
    """
    if run is None:
        _list_runs(run_dir, json_)
        return
    with os_errors_as_messages():
        folder = find_run(run, run_dir)
        content = read_status(folder)
        cause = read_cause(folder)
    if json_:
        print(json.dumps({"run": str(folder.path), **content}))
        return
    from plait.report.terminal import describe

    age = show_seconds(max(0.0, time.time() - content["updated"]))
    lines = [f"{folder.path}: {content['state']}, last update {age} ago"]
    progress = content["progress"]
    if progress:
        lines.append(describe(progress, content["state"] in GOING_ON))
    for trial, why in progress.get("failed", {}).items():
        lines.append(f"trial {trial} failed: {why}")
    if content["state"] == "failed" and cause is not None:
        lines.append(f"it ended with: {cause} (see {folder.failure})")
    for worker in content["workers"]:
        alive = "alive" if worker["alive"] else "ended"
        lines.append(f"worker {worker['rank']} on {worker['host']}: pid {worker['pid']}, {alive}")
    print(printable("\n".join(lines)))


def _list_runs(run_dir: Path, json_: bool) -> None:
    """Print every run below the folder, newest first, and name those that cannot be read."""
    with os_errors_as_messages():
        rows = list_runs(run_dir) if run_dir.is_dir() else []
    if json_:
        print(json.dumps({"run_dir": str(run_dir), "runs": rows}))
        return
    if not rows:
        missing = "has no runs" if run_dir.is_dir() else "does not exist"
        print(f"no runs: {run_dir}/ {missing} (plait train makes one; --run-dir names another folder)")
        return
    from plait.report.terminal import runs_table

    print(runs_table(rows, time.time()))
    for row in rows:
        if "error" in row:
            print(printable(f"cannot read {row['name']}: {row['error']}"))


def stop(
    run: RunArgument,
    run_dir: RunsFolder = Path("runs"),
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the run to end.")] = 120.0,
    json_: JsonFlag = False,
) -> None:
    """End a running job cleanly: it finishes its step and writes a checkpoint.

    Example: plait stop digits
    """
    if not 0 <= timeout <= LONGEST_S:
        raise InputError(f"--timeout: found {timeout:g}, expected seconds, {LONGEST_S:,.0f} at most")
    with os_errors_as_messages():
        folder = find_run(run, run_dir)
        ask_to_stop(folder)
        end = time.monotonic() + timeout
        while folder.holder() is not None:
            if time.monotonic() > end:
                raise PlaitError(
                    f"{folder.path}: still running after {timeout:.0f} s; stop it again to end it at once"
                )
            time.sleep(0.1)
        content = read_status(folder)
    if json_:
        print(json.dumps({"run": str(folder.path), **content}))
    else:
        print(printable(f"{folder.path}: {content['state']} at step {content['progress'].get('step', 0)}"))
        if command := resume_command(folder):
            print(f"next: {command}")


def resume_command(folder: RunDir) -> str:
    """The command that goes on with the run; empty for a script, which resumes by itself."""
    kind = RunKind.SWEEP if folder.sweep.exists() else RunKind.TRAIN
    return kind.resume_command(folder.path, folder.job) if folder.record.exists() else ""


def resize(
    run: RunArgument,
    workers: Annotated[
        int | None, typer.Argument(help="The new number of workers.", show_default=False)
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", help="The new number of workers on each host: w0:2,w1:1.")
    ] = None,
    without: Annotated[
        list[int] | None, typer.Option(help="A worker that is to leave, by its number (repeatable).")
    ] = None,
    if_version: Annotated[
        int | None, typer.Option(help="Only if it has not changed since this version.")
    ] = None,
    why: Annotated[str, typer.Option(help="The reason, for the run's record.")] = "plait resize",
    wait: Annotated[float, typer.Option(help="Seconds to wait until all take part; 0: do not.")] = 120.0,
    run_dir: RunsFolder = Path("runs"),
    json_: JsonFlag = False,
) -> None:
    """Change the number of workers of a running job; without a number, show it.

    Example: plait resize digits 4
    """
    if not 0 <= wait <= LONGEST_S:
        raise InputError(f"--wait: found {wait:g}, expected seconds, {LONGEST_S:,.0f} at most")
    if workers is not None and hosts is not None:
        raise InputError("WORKERS and -H: found both; -H already says how many workers each host holds")
    if workers is None and without:
        raise InputError("--without: expected the number of workers to go on with before it")
    from plait.launcher.control import ask_job

    with os_errors_as_messages():
        folder = find_run(run, run_dir)
        asked: dict[str, object] = {}
        if hosts is not None:
            asked = {"hosts": hosts.split(",")}
        elif workers is not None:
            asked = {"workers": workers, "without": without or []}
        state = ask_job(folder, {**asked, "version": if_version, "why": why} if asked else None)
        version, end = state["version"], time.monotonic() + wait
        while not state["is_settled"] and state["version"] == version and time.monotonic() < end:
            time.sleep(0.1)
            state = ask_job(folder)
    if json_:
        print(json.dumps({"run": str(folder.path), **state}))
        return
    now = len(state["members"])
    rest = "" if state["is_settled"] else f", {state['workers']} wanted"
    print(f"{folder.path}: {count_of(now, 'worker')}{rest} (version {state['version']})")
    print(f"workers {', '.join(map(str, state['members']))}; next: plait status {folder.path}")


def ask_to_stop(folder: RunDir) -> None:
    """Send SIGTERM to the supervisor of a run, which must run on this host."""
    pid = _supervisor(folder)
    with os_errors_as_messages():
        folder.stop_request.touch()
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        os.kill(pid, signal.SIGTERM)


def can_stop(folder: RunDir) -> bool:
    """Whether the run goes on and `ask_to_stop` reaches it from here."""
    try:
        _supervisor(folder)
    except (InputError, OSError):
        return False
    return True


def _supervisor(folder: RunDir) -> int:
    """The pid of the run's supervisor; InputError if there is none that this process may stop."""
    holder = folder.holder()
    if holder is None:
        raise InputError(f"{folder.path}: not running ({known_status(folder)['state']}); nothing to stop")
    host, pid = holder
    if pid <= 1:  # a signal to such a process would reach others
        raise InputError(f"{folder.path}: running, but its lock does not name the process; end it by hand")
    if host != socket.gethostname():
        raise InputError(f"{folder.path}: it is run from {host}; stop it there")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise InputError(
            f"{folder.path}: its process {pid} belongs to another user; have them stop it, or do it as them"
        ) from None
    return pid


def evaluate(
    run: RunArgument,
    run_dir: RunsFolder = Path("runs"),
    best: Annotated[bool, typer.Option(help="The best checkpoint instead of the newest.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint that the run has kept.")] = False,
    score: Annotated[
        list[str] | None,
        typer.Option(help="An option of the data set's scores, such as beam=1 (repeatable)."),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Also evaluate another user's run, which executes its code.")
    ] = False,
    json_: JsonFlag = False,
) -> None:
    """Measure a run's checkpoint on the test split.

    Example: plait evaluate runs/digits-001
    """
    with os_errors_as_messages():
        folder = find_run(run, run_dir)
        if not trust:
            folder.check_owner("say --trust")
        modules = folder.read_record().modules if folder.record.exists() else ()
    if best and every:
        raise InputError("--best and --all: found both, expected at most one of them")
    options: dict[str, Any] = {}
    if score:
        from plait.schema.job import parse_override

        options = dict(parse_override(text, "--score") for text in score)
    show_logs()
    with searching(os.getcwd(), *modules, str(folder.path.absolute())):
        from plait.jobs.evaluate import measure_kept, measure_run

        rows = measure_kept(folder, options) if every else [measure_run(folder, best, options)]
    if json_:
        content = {"checkpoints": rows} if every else rows[0]
        print(json.dumps({"run": str(folder.path), **content}))
        return
    for row in rows:
        print(f"{folder.path} at step {row['step']}: {show_metrics(row['metrics'])}")
