"""`plait bench`: the published experiments, each with the claims it was made to test."""

from __future__ import annotations

import importlib
import inspect
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.train import JsonFlag
from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.core.shown import shown

GROUP = "plait.benches"
TO_INSTALL = "from a checkout of Plait: pip install ./benchmarks"


def installed() -> dict[str, str]:
    """The installed experiments: their names and modules, which are not imported."""
    modules = {each.name: each.module for each in entry_points(group=GROUP)}
    return dict(sorted(modules.items()))


class BenchCommand(TyperCommand):
    """Lists the experiments in its help; they are only searched for there, because that is slow."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        named = ", ".join(installed()) or f"none is installed ({TO_INSTALL})"
        for each in self.params:
            if each.name == "name":
                each.help = f"Which one: {named}."  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


def bench(
    name: Annotated[str, typer.Argument(help="Which one.", show_default=False)],
    part: Annotated[
        list[str] | None, typer.Option(help="Only this part of it; may be given several times.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A shorter course, under a minute, where there is one.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the rows, where the experiment can.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Run an experiment and its baseline side by side; exit status 1 when a claim does not hold.

    Example: plait bench planner
    """
    modules = installed()
    if not modules:
        raise InputError(f"bench: the experiments are a separate package; {TO_INSTALL}")
    if name not in modules:
        raise InputError(f"NAME: found {shown(name)}, expected an experiment{did_you_mean(name, modules)}")
    module = importlib.import_module(modules[name])
    known = getattr(module, "PARTS", {})
    for chosen in part or ():
        if chosen not in known:
            raise InputError(
                f"--part: found {shown(chosen)}, expected a part of {name}{did_you_mean(chosen, known)}"
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
            done.write_csv(csv)
        if png is not None:
            module.write_plot(done, png)
    print(json.dumps(done.as_json()) if json_ else done.render())
    if not done.holds:
        raise typer.Exit(1)
