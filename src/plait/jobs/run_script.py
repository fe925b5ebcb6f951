"""A script of the user on workers of Plait's supervisor, which may come and go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from plait.api.launching import PRELOAD, read_limits
from plait.core.errors import InputError, LaunchError
from plait.core.names import nearest
from plait.launcher.display import Display
from plait.launcher.environment import check_alone
from plait.launcher.messages import Launch
from plait.launcher.run import StatusFile, controlled
from plait.launcher.run_dir import RunDir, new_run
from plait.launcher.supervision.launch_errors import Interrupted
from plait.launcher.supervisor import Supervisor
from plait.schema.hosts import LOCAL, Host, parse_hosts
from plait.schema.placement import Placement

# Options of `plait run` itself, and what other launchers call the number of workers.
_OPTIONS = ("-np", "-H", "--elastic")
_ALSO_WORKERS = ("workers", "nproc", "np", "n", "nprocpernode", "numworkers")


def _hint(option: str) -> str:
    """What the user may have meant by an option that is not known."""
    name = option.lstrip("-").partition("=")[0]
    if name.replace("-", "").replace("_", "") in _ALSO_WORKERS:
        return "; the number of workers is -np"
    close = nearest(f"--{name}", ("--elastic", "--run-dir", "--nic", "--quiet", "--json"))
    return "" if close is None else f"; did you mean {close!r}?"


def run_script(
    script: Path,
    arguments: Sequence[str],
    workers: int | None,
    hosts: str | None,
    nic: str | None,
    elastic: str,
    run_dir: Path,
    display: Display,
) -> RunDir:
    """Run `script` to its end on all workers; returns the folder with its status and logs.

    `status`, `stop` and `resize` take that folder while the script runs.
    """
    if str(script).startswith("-"):
        raise InputError(
            f"{script}: plait run has no such option{_hint(str(script))}; options of the script follow it: "
            f"plait run -np 2 script.py {script}. See plait run --help"
        )
    if re.fullmatch(r"python[\d.]*", script.name):
        given = next((each for each in arguments if each.endswith(".py")), "script.py")
        raise InputError(
            f"SCRIPT: found the interpreter {str(script)!r}, which plait run starts itself; leave it out: "
            f"plait run -np 2 {given}"
        )
    if not script.is_file():
        raise InputError(f"SCRIPT: found {str(script)!r}, expected the file of a Python script")
    if workers is not None and hosts is not None:
        raise InputError("-np and -H: found both; -H already says how many workers each host holds")
    if workers is not None and workers < 1:
        raise InputError(f"-np: found {workers}, expected at least 1")
    for option in _OPTIONS:
        if option in arguments:
            display.printed(
                f"warning: {option} comes after {script} and is given to the script; if it is meant for "
                f"plait run, put it before: plait run {option} ... {script}"
            )
    check_alone()
    slots = (Host(LOCAL, workers or 1),) if hosts is None else parse_hosts(hosts.split(","), "-H")
    limits = read_limits(elastic, sum(host.slots for host in slots))
    placement = Placement(hosts=slots, nic=nic, elastic=limits)
    folder = new_run(run_dir, script.stem)
    order = {"script": str(script.absolute()), "arguments": list(arguments)}
    with folder.lock():
        status = StatusFile(folder, display, lambda: None)
        task = Launch(
            placement,
            "plait.api.launching:run_script",
            order,
            folder.logs.absolute(),
            preload=PRELOAD,
            saves=False,
        )
        supervisor = Supervisor(task, status)
        try:
            with controlled(supervisor, placement, folder):
                supervisor.run(status.write)
        except BaseException as failure:
            status.write(state="stopped" if isinstance(failure, Interrupted) else "failed")
            if isinstance(failure, LaunchError):
                failure.exit_status = supervisor.exit_status(failure)
            raise
        status.write(state="finished")
    return folder
