"""`plait bench`: the published experiments, each with the claims it was made to test."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.core.shown import shown

# Each has a function run(command=...) -> Bench; one that has PARTS by name takes parts=... besides, and one
# whose run has a parameter `quick` a shorter course.
MODULES = {
    "adaptive-batch": "plait_bench.adapt.adaptive_batch",
    "adaptive-topology": "plait_bench.adapt.adaptive_topology",
    "elastic": "plait_bench.adapt.elastic",
    "fusion": "plait_bench.fusion.bench",
    "monitoring": "plait_bench.adapt.monitoring",
    "pipeline": "plait_bench.pipeline.bench",
    "planner": "plait_bench.planner",
    "profiler": "plait_bench.profiler",
    "scalability": "plait_bench.sync.scalability",
    "sync": "plait_bench.sync.bench",
}


def bench(
    name: Annotated[str, typer.Argument(help=f"Which one: {', '.join(MODULES)}.", show_default=False)],
    part: Annotated[
        list[str] | None, typer.Option(help="Only this part of it; may be given several times.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A shorter course, under a minute, where there is one.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the rows, where the experiment can.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run an experiment and its baseline side by side; exit status 1 when a claim does not hold.

    Example: plait bench planner
    """
    if name not in MODULES:
        raise InputError(f"NAME: found {shown(name)}, expected an experiment{did_you_mean(name, MODULES)}")
    from plait_bench.harness import as_json, render, write_csv

    module = importlib.import_module(MODULES[name])
    known = getattr(module, "PARTS", {})
    for found in part or ():
        if found not in known:
            raise InputError(
                f"--part: found {shown(found)}, expected a part of {name}{did_you_mean(found, known)}"
            )
    if png is not None and not hasattr(module, "write_plot"):
        raise InputError(f"--png: {name} draws no picture; leave it out")
    if png is not None and png.suffix.lower() != ".png":
        raise InputError(f"--png: found {shown(str(png))}, expected a name that ends in .png")
    if quick and "quick" not in inspect.signature(module.run).parameters:
        raise InputError(f"--quick: {name} has no shorter course; leave it out")
    flags = [*(f"--part {each}" for each in part or ()), *(["--quick"] if quick else [])]
    options = {"parts": part} if part else {}
    done = module.run(
        command=" ".join([f"plait bench {name}", *flags]), **options, **({"quick": True} if quick else {})
    )
    with os_errors_as_messages():
        if csv is not None:
            write_csv(done, csv)
        if png is not None:
            module.write_plot(done, png)
    print(json.dumps(as_json(done)) if json_ else render(done))
    if not done.holds:
        raise typer.Exit(1)
