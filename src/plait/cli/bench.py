"""`plait bench`: the published experiments, each with the claims it was made to test."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated

import typer

from plait.core.errors import InputError
from plait.core.names import did_you_mean

# Each is a module of plait.experiments with a function run(command=...) -> Bench.
NAMES = ("fusion", "pipeline", "planner", "profiler")


def bench(
    name: Annotated[str, typer.Argument(help=f"Which one: {', '.join(NAMES)}.", show_default=False)],
    csv: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run an experiment and its baseline side by side; exit status 1 when a claim does not hold.

    Example: plait bench planner
    """
    if name not in NAMES:
        raise InputError(f"NAME: found {name!r}, expected an experiment{did_you_mean(name, NAMES)}")
    from plait.experiments.bench import as_json, render, write_csv

    done = importlib.import_module(f"plait.experiments.{name}").run(command=f"plait bench {name}")
    if csv is not None:
        write_csv(done, csv)
    print(json.dumps(as_json(done)) if json_ else render(done))
    if not done.holds:
        raise typer.Exit(1)
