"""`plait status`, `stop` and `evaluate`: what one does with a run."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from plait.cluster.hosts import LOCAL
from plait.core.artefact import read_json
from plait.core.errors import InputError, PlaitError
from plait.core.logs import show_logs
from plait.core.units import show_seconds
from plait.runtime.folder import RunFolder, find_run

RunArgument = Annotated[
    str, typer.Argument(help="A run's folder, its name, or a job's name.", show_default=False)
]
RunDir = Annotated[Path, typer.Option(help="Where runs are looked up by name.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def status(run: RunArgument, run_dir: RunDir = Path("runs"), json_: JsonFlag = False) -> None:
    """Tell who is alive, the step, samples/s and time left of a run.

    Example: plait status runs/digits-001
    """
    folder = find_run(run, run_dir)
    found = read_status(folder)
    if json_:
        print(json.dumps({"run": str(folder.path), **found}))
        return
    from plait.cli.show import describe

    age = show_seconds(max(0.0, time.time() - found["updated"]))
    print(f"{folder.path}: {found['state']}, last word {age} ago")
    if found["progress"]:
        print(describe(found["progress"]))
    if found["state"] == "failed" and folder.failure.exists():
        print(f"it ended with: {folder.failure.read_text().strip().splitlines()[-1]} (see {folder.failure})")
    for worker in found["workers"]:
        alive = "alive" if worker["alive"] else "ended"
        print(f"worker {worker['rank']} on {worker['host']}: pid {worker['pid']}, {alive}")


def read_status(folder: RunFolder) -> dict[str, Any]:
    """The run's status file, with what is true of it now: is the supervisor there, is each worker."""
    found = read_json(folder.status, "status")
    running = folder.holder() is not None
    if not running and found["state"] in ("starting", "running", "stopping"):
        found["state"] = "died"
    for worker in found["workers"]:
        # A worker's end on another host ends the run within moments, so there the run itself is the sign.
        worker["alive"] = running and (worker["host"] != LOCAL or _is_alive(worker["pid"]))
    return found


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stop(
    run: RunArgument,
    run_dir: RunDir = Path("runs"),
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the run to end.")] = 120.0,
    json_: JsonFlag = False,
) -> None:
    """End a running job cleanly: it finishes its step and writes a checkpoint.

    Example: plait stop digits
    """
    folder = find_run(run, run_dir)
    holder = folder.holder()
    if holder is None:
        state = read_status(folder)["state"] if folder.status.exists() else "never started"
        raise InputError(f"{folder.path}: not running ({state}); nothing to stop")
    host, pid = holder
    if host != socket.gethostname():
        raise InputError(f"{folder.path}: it is run from {host}; stop it there")
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + timeout
    while folder.holder() is not None:
        if time.monotonic() > end:
            raise PlaitError(
                f"{folder.path}: still running after {timeout:.0f} s; stop it again to end it at once"
            )
        time.sleep(0.1)
    found = read_status(folder)
    if json_:
        print(json.dumps({"run": str(folder.path), **found}))
    else:
        print(f"{folder.path}: {found['state']} at step {found['progress'].get('step', 0)}")
        is_sweep = (folder.path / "sweep.json").exists()
        on = f"sweep {folder.job} --resume" if is_sweep else f"train {folder.job} --resume --run"
        print(f"next: plait {on} {folder.path}")


def evaluate(
    run: RunArgument,
    run_dir: RunDir = Path("runs"),
    best: Annotated[bool, typer.Option(help="The best checkpoint instead of the newest.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Measure a run's checkpoint on the test split.

    Example: plait evaluate runs/digits-001
    """
    folder = find_run(run, run_dir)
    from plait.runtime.measure import measure_run

    show_logs()
    found = measure_run(folder, best)
    if json_:
        print(json.dumps({"run": str(folder.path), **found}))
        return
    from plait.cli.show import show_metric

    words = ", ".join(f"{name} {show_metric(name, value)}" for name, value in found["metrics"].items())
    print(f"{folder.path} at step {found['step']}: {words}")
