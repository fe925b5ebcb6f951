"""`plait bench`: the published experiments, each with the claims it was made to test."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from threading import Timer
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.train import JsonFlag
from plait.core.errors import InputError, PlaitError
from plait.core.files import write_output
from plait.core.names import did_you_mean
from plait.core.shown import printable, shown
from plait.core.units import count_of, show_bytes, show_seconds

if TYPE_CHECKING:
    from plait.report.outputs.experiments import ExperimentRun

GROUP = "plait.benches"
# When a quick course is ended that takes ten times what it may, and the time that it has for that.
QUICK_LIMIT_S = 600.0
END_S = 30.0
# The last lines of what a failed experiment printed.
MOST_LINES = 12
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
    name: Annotated[str | None, typer.Argument(help="Which one.", show_default=False)] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Only this part of it; may be given several times.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every experiment, as one HTML page.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A shorter course, under a minute each.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", help="With --all: the page to write. [default: bench.html]")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the rows.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Run an experiment and its baselines side by side; exit status 1 when a claim does not hold.

    Example: plait bench planner
    """
    modules = installed()
    if not modules:
        raise InputError(f"bench: the experiments are a separate package; {TO_INSTALL}")
    if every:
        if name is not None or part or csv is not None or png is not None:
            raise InputError("--all: found with NAME, --part, --csv or --png, which are of one experiment")
        with os_errors_as_messages():
            run_all(list(modules), quick, output or Path("bench.html"), json_)
        return
    if name is None or output is not None:
        expected = "-o: found without --all" if name is not None else "NAME: missing"
        raise InputError(f"{expected}; expected plait bench NAME, or plait bench --all [-o FILE]")
    if name not in modules:
        raise InputError(f"NAME: found {shown(name)}, expected an experiment{did_you_mean(name, modules)}")
    if png is not None and png.suffix.lower() != ".png":
        raise InputError(f"--png: found {shown(str(png))}, expected a name that ends in .png")
    for option, path in (("--csv", csv), ("--png", png)):
        if path is not None:
            _check_writable(option, path)
    module = importlib.import_module(modules[name])
    known = getattr(module, "PARTS", {})
    for chosen in part or ():
        if not known:
            raise InputError(f"--part: found {shown(chosen)}, but {name} has no parts; leave it out")
        if chosen not in known:
            raise InputError(
                f"--part: found {shown(chosen)}, expected a part of {name}{did_you_mean(chosen, known)}"
            )
    flags = [*(f"--part {each}" for each in part or ()), *(["--quick"] if quick else [])]
    options = {"parts": part} if part else {}
    done = module.run(command=" ".join([f"plait bench {name}", *flags]), quick=quick, **options)
    # First what a full disk cannot keep back.
    print(json.dumps(done.as_json()) if json_ else done.render(), flush=True)
    with os_errors_as_messages():
        if csv is not None:
            done.write_csv(csv)
        if png is not None:
            module.write_plot(done, png)
    if not done.holds:
        raise typer.Exit(1)


def _check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before an experiment that may take an hour."""
    if path.is_dir():
        raise InputError(f"{option}: found the folder {shown(str(path))}, expected a file to write")
    folder = next(each for each in path.absolute().parents if each.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        raise InputError(f"{option}: found {shown(str(path))}, but {folder} cannot be written to") from None


def run_all(names: Sequence[str], quick: bool, page: Path, json_: bool) -> None:
    """Run every experiment in a process, and write the page before the first and after each.

    One that fails does not end the others. Exits if one failed, and on Ctrl-C: the page has the others.
    """
    from plait.report.outputs.experiments import ExperimentRun, make_bench_page

    command = "plait bench --all --quick" if quick else "plait bench --all"
    runs = [ExperimentRun(name) for name in names]
    write_output(page, make_bench_page(command, runs))
    for index, name in enumerate(names):
        print(f"{name} ({index + 1} of {len(names)})", file=sys.stderr, flush=True)
        try:
            runs[index] = _run_one(name, quick)
        except KeyboardInterrupt:
            done = f"{index} of {count_of(len(names), 'experiment')}"
            print(f"interrupted during {name}; {page} has the results of {done}", file=sys.stderr)
            raise typer.Exit(130) from None
        print(f"{name}: {runs[index].state}", file=sys.stderr, flush=True)
        write_output(page, make_bench_page(command, runs))
    failed = [run.name for run in runs if run.failure]
    states = {run.name: run.state for run in runs}
    if json_:
        results = {run.name: run.content for run in runs}
        print(json.dumps({"page": str(page), "states": states, "experiments": results}))
    else:
        print("\n".join(f"{name}: {state}" for name, state in states.items()))
        print(f"wrote {page} ({show_bytes(page.stat().st_size)})")
    if failed:
        raise PlaitError(
            f"{count_of(len(failed), 'experiment')} failed: {', '.join(failed)}; {page} says how"
        )
    if not all(run.is_good for run in runs):
        raise typer.Exit(1)


def _run_one(name: str, quick: bool) -> ExperimentRun:
    """One experiment by its command, in a process; its progress is shown as it comes."""
    from plait.report.outputs.experiments import ExperimentRun

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        png, result = Path(folder) / f"{name}.png", Path(folder) / "result.json"
        arguments = ["bench", name, "--json", "--png", str(png), *(["--quick"] if quick else [])]
        with result.open("wb") as file:
            status, last_lines = _run_shown(arguments, file, QUICK_LIMIT_S if quick else None)
        seconds = time.monotonic() - started
        try:
            content = json.loads(result.read_text(errors="replace"))
        except ValueError:
            content = {}
        if "claims" in content:
            return ExperimentRun(name, seconds, content, png.read_bytes() if png.exists() else None)
        failure = "\n".join([*last_lines, f"exit status {status} after {show_seconds(seconds)}"])
        return ExperimentRun(name, seconds, failure=failure)


def _run_shown(
    arguments: Sequence[str], output: IO[bytes], limit_s: float | None
) -> tuple[int, Sequence[str]]:
    """Run a command of Plait and show its standard error; its exit status and the last lines of that.

    After `limit_s` it is asked to end, and soon after that it is killed.
    """
    last_lines: deque[str] = deque(maxlen=MOST_LINES)
    command = [sys.executable, "-m", "plait", *arguments]
    with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
        timers = [Timer(limit_s, child.terminate), Timer(limit_s + END_S, child.kill)] if limit_s else []
        for timer in timers:
            timer.start()
        try:
            assert child.stderr is not None
            for line in child.stderr:
                last_lines.append(line.decode(errors="replace").rstrip())
                print(printable(last_lines[-1]), file=sys.stderr, flush=True)
            status = child.wait()
        except BaseException:
            child.terminate()
            raise
        finally:
            for timer in timers:
                timer.cancel()
    return status, last_lines
