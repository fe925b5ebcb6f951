"""`plait report RUN --watch`: the page of a run, served while the run goes on, with buttons to steer it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from plait.cli.runs import ask_to_stop, can_stop, resume_command
from plait.cli.status_file import known_status, read_cause
from plait.core.errors import InputError
from plait.core.names import check_extra
from plait.core.shown import printable, shown
from plait.core.units import count_of
from plait.launcher.run_dir import RunDir

if TYPE_CHECKING:
    from plait.report.live.live_run import RunNow
    from plait.schema.plans.plan import Plan

# The job's processes come first.
NICENESS = 10


def watch(folder: RunDir, plan: Callable[[], Plan | None], host: str, port: int, as_json: bool) -> None:
    """Serve the page of the run until Ctrl-C; `plan` reads the plan that it was started with."""
    for package in ("starlette", "uvicorn"):
        check_extra(package, "--watch")
    from plait.report.live.live_run import LiveRun
    from plait.report.live.server import listen, serve

    name = folder.path.absolute().name
    live = LiveRun(name, folder.path, lambda: run_now(folder), plan)
    live.read()
    listener, access = listen(host, port)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    url = f"http://{access.address}:{listener.getsockname()[1]}/?token={access.token}"
    if as_json:
        print(json.dumps({"run": str(folder.path), "url": url}), flush=True)
    else:
        print(printable(f"{folder.path}: {url}"))
        print("Ctrl-C ends the page, not the run", flush=True)
    with listener:
        serve(live, listener, access, actions_of(folder))


def run_now(folder: RunDir) -> RunNow:
    """The run as its status and its lock have it, and what it can be asked for."""
    from plait.launcher.run_dir import GOING_ON
    from plait.report.live.live_run import RunNow

    status: dict[str, Any] = {"state": "its folder is gone", "progress": {}, "workers": []}
    try:
        if folder.path.exists():
            status = known_status(folder)
    except OSError as failure:
        status["state"] = f"its status cannot be read: {failure.strerror}"
    state = status["state"]
    has_failed = state in ("failed", "died")
    # One that has written its end may hold its lock for a moment.
    is_stoppable = state in GOING_ON and can_stop(folder)
    return RunNow(
        state,
        read_cause(folder) if has_failed else None,
        status["progress"],
        sum(worker["alive"] for worker in status["workers"]),
        is_stoppable,
        is_stoppable and os.access(folder.control, os.R_OK),
        resume_command(folder) if has_failed or state == "stopped" else "",
    )


def actions_of(folder: RunDir) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """What the buttons do: the same as `plait stop` and `plait resize` without waiting."""
    from plait.launcher.control import ask_job

    def stop(content: Mapping[str, Any]) -> str:
        ask_to_stop(folder)
        return "The run was asked to stop; its state is above."

    def resize(content: Mapping[str, Any]) -> str:
        workers = content.get("workers")
        if not isinstance(workers, int) or isinstance(workers, bool):
            raise InputError(f"workers: found {shown(workers)}, expected a whole number")
        state = ask_job(folder, {"workers": workers, "why": "asked for in the page of the report"})
        now = count_of(len(state["members"]), "worker")
        return f"{now} now, {state['workers']} wanted (version {state['version']}); see Adaptations."

    return {"stop": stop, "resize": resize}
