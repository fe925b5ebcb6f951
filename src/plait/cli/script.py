"""`plait run`: a script of the user on workers that may come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.train import HostsOption, JsonFlag, NicOption, QuietFlag, WorkersOption

# What follows the script is for the script.
OPTIONS_END = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def run(
    script: Annotated[Path, typer.Argument(help="The script (Python).", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="The arguments of the script.")] = None,
    workers: WorkersOption = None,
    hosts: HostsOption = None,
    nic: NicOption = None,
    elastic: Annotated[
        str, typer.Option(help="The fewest workers to go on with, and the most to resize to: 2:8.")
    ] = "1",
    run_dir: Annotated[Path, typer.Option(help="The folder of the run's logs and status.")] = Path("runs"),
    quiet: QuietFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Run a script with a training loop on workers that may come and go (plait.Elastic).

    Example: plait run -np 3 examples/elastic_loop.py
    """
    from plait.jobs.run_script import run_script
    from plait.report.terminal import ScriptDisplay

    with os_errors_as_messages(), ScriptDisplay(quiet or json_) as display:
        folder = run_script(script, arguments or [], workers, hosts, nic, elastic, run_dir, display)
    if json_:
        print(json.dumps({"run": str(folder.path), "state": "finished"}))
    else:
        display.printed(f"finished; the output of its workers is in {folder.logs}")
