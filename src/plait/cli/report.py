"""`plait report`: a run as one HTML page, a trace, tables or a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.runs import RunArgument, RunsFolder
from plait.cli.status_file import known_status, list_runs, read_cause
from plait.cli.train import JsonFlag
from plait.core.artefact import read_json
from plait.core.codec import decode
from plait.core.errors import ArtefactError, InputError, PlaitError
from plait.core.files import write_output
from plait.core.names import check_extra
from plait.core.units import show_bytes
from plait.launcher.run_dir import RunDir, find_run
from plait.schema.plans.plan import Plan

# A page of a folder has its newest runs.
MOST_RUNS = 200
# Where --watch listens unless told otherwise: only this machine reaches it.
HOST = "127.0.0.1"
# A file of Plait's has its mark within the first bytes.
_HEAD_BYTES = 400


def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("-o", help="The page to write. [default: NAME.report.html]")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also write a Chrome trace here, which Perfetto opens.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write tables (CSV) to this folder.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw the curves here; needs matplotlib.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also replace files that are no report of Plait's.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page and keep it up to date, until Ctrl-C.")
    ] = False,
    host: Annotated[str, typer.Option(help="Where --watch listens.")] = HOST,
    port: Annotated[int, typer.Option(help="The port of --watch; 0: any free one.")] = 0,
    run_dir: RunsFolder = Path("runs"),
    json_: JsonFlag = False,
) -> None:
    """Write a run as one HTML page: curves, timeline, stages, replicas, adaptations, faults, trials.

    Of a folder of runs, the page lists them and compares those that are chosen in it.

    Example: plait report runs/digits-001
    """
    with os_errors_as_messages():
        if watch:
            _watch(run, run_dir, (output, trace, csv, png), host, port, json_)
            return
        if (host, port) != (HOST, 0):
            raise InputError("--host, --port: found without --watch, which they belong to; add --watch")
        rows = _runs_below(run)
        if rows:
            written = [_write_list(Path(run), rows, output, (trace, csv, png), force)]
            _print_written({"folder": run, "runs": len(rows)}, written, json_)
            return
        try:
            folder = find_run(run, run_dir)
        except InputError as error:
            if run and Path(run).is_dir():
                raise InputError(f"{error}, and no run below {run}/ to list") from None
            raise
        if png is not None:
            check_extra("matplotlib", f"--png {png}")
        page = output or Path(f"{folder.path.absolute().name}.report.html")
        written = _write(folder, page, trace, csv, png, force)
    _print_written({"run": str(folder.path)}, written, json_)


def _print_written(content: Mapping[str, Any], written: Sequence[Path], as_json: bool) -> None:
    if as_json:
        print(json.dumps({**content, "files": [str(path) for path in written]}))
        return
    for path in written:
        if path.is_file():  # and no stream, such as /dev/stdout
            print(f"wrote {path} ({show_bytes(path.stat().st_size)})")


def _runs_below(text: str) -> list[dict[str, Any]]:
    """The runs in the folder that `text` names, newest first; none if it names no folder, or a run."""
    path = Path(text)
    return [] if not text or RunDir(path).is_run or not path.is_dir() else list_runs(path)


def _write_list(
    path: Path, rows: Sequence[Mapping[str, Any]], output: Path | None, others: Sequence[Any], force: bool
) -> Path:
    """Write the page of all runs below the folder `path`."""
    from plait.report.comparison import ComparedRun, compared
    from plait.report.outputs.markup import MARK
    from plait.report.outputs.runs_page import make_runs_page
    from plait.report.record import read_run

    if any(other is not None for other in others):
        raise InputError(
            f"--trace, --csv, --png: found {str(path)!r}, a folder of runs, expected one run; "
            f"name one of them, such as {rows[0]['run']}"
        )
    page = output or Path(f"{path.absolute().name}.report.html")
    if not force:
        _check_replaceable(page, MARK)
    runs = []
    for row in rows[:MOST_RUNS]:
        name, state = row["name"], row["state"]
        try:
            if "error" in row:
                raise InputError(row["error"])
            recorded = read_run(Path(row["run"]))
            if not recorded.events:
                raise InputError("it has no events")
            settings = _settings(RunDir(Path(row["run"])))
            runs.append(compared(name, state, recorded, settings, row.get("progress")))
        except (PlaitError, OSError) as problem:
            runs.append(ComparedRun(name, state, problem=str(problem)))
    write_output(page, make_runs_page(path.absolute().name, runs, len(rows) - len(runs)))
    return page


def _settings(folder: RunDir) -> Mapping[str, Any]:
    """The job of a run as its file has it; nothing if it cannot be read."""
    if not folder.job.is_file():
        return {}
    try:
        content = yaml.safe_load(folder.job.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _watch(
    run: str, run_dir: Path, outputs: Sequence[Path | None], host: str, port: int, as_json: bool
) -> None:
    from plait.cli.watch import watch

    if any(path is not None for path in outputs):
        raise InputError(
            "--watch: found -o, --trace, --csv or --png, expected none of them: it writes no files"
        )
    if rows := _runs_below(run):
        raise InputError(
            f"--watch: found {run!r}, a folder of runs, expected one run; name one of them, such as "
            f"{rows[0]['run']}"
        )
    folder = find_run(run, run_dir)
    watch(folder, lambda: _plan(folder)[0], host, port, as_json)


def _write(
    folder: RunDir, page: Path, trace: Path | None, csv: Path | None, png: Path | None, force: bool
) -> list[Path]:
    """Write what was asked for, after checking that nothing else is replaced; returns the files."""
    from plait.report.outputs import markup, picture, tables
    from plait.report.outputs import page as pages
    from plait.report.outputs import trace as traces
    from plait.report.record import read_run
    from plait.report.run_data import make_data

    named = [path.resolve() for path in (page, trace, png) if path is not None and not path.is_char_device()]
    if len(set(named)) < len(named):
        raise InputError("-o, --trace, --png: found one file for two of them, expected a file for each")
    for option, file in (("-o", page), ("--trace", trace), ("--png", png)):
        if file is not None and file.is_dir():
            raise InputError(f"{option}: found {str(file)!r}, a folder, expected a file")
    if csv is not None and csv.exists() and not csv.is_dir():
        raise InputError(f"--csv: found {str(csv)!r}, a file, expected a folder")
    if not force:
        for path, mark in ((page, markup.MARK), (trace, traces.MARK), (png, picture.MARK)):
            _check_replaceable(path, mark)
    recorded = read_run(folder.path)
    status = known_status(folder)
    state = status["state"]
    if not recorded.events and not len(recorded.ops):
        cause = read_cause(folder)
        ended = f"; it ended with: {cause}" if cause is not None else ""
        hint = f"plait train and plait sweep record some, a script does not; see: plait status {folder.path}"
        raise InputError(f"{folder.path}: it has no events ({state}){ended}; {hint}")
    name = folder.path.absolute().name
    cause = read_cause(folder) if state in ("failed", "died") else None
    plan, unknown = _plan(folder)
    data = make_data(name, recorded, plan, state, cause, status["progress"])
    if unknown:
        data = replace(data, facts=(*data.facts, ("plan", unknown)))
    texts = {page: pages.make_page(data)}
    if trace is not None:
        texts[trace] = traces.make_trace(data, recorded)
    if csv is not None:
        rows = {csv / name: text for name, text in tables.make_tables(data, recorded).items()}
        for path, text in rows.items():
            if not force:
                # Its first columns; the others depend on the version of Plait and on the run.
                _check_replaceable(path, ",".join(text.partition("\n")[0].split(",")[:2]))
        csv.mkdir(parents=True, exist_ok=True)
        texts |= rows
    for path, text in texts.items():
        write_output(path, text)
    if png is not None:
        picture.draw_report(data, png)
    return [*texts, *([png] if png is not None else [])]


def _check_replaceable(path: Path | None, mark: str) -> None:
    """Raise InputError if a file exists at `path` that is neither empty nor has `mark` at its beginning."""
    if path is None or not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head and mark.encode() not in head:
        raise InputError(
            f"{path}: exists and is no report of Plait's; name another file, or say --force to replace it"
        )


def _plan(folder: RunDir) -> tuple[Plan | None, str]:
    """The plan that a run in stages was started with, and why it is not known where it cannot be read."""
    if not folder.settings.is_file():
        return None, ""
    try:
        stages = read_json(folder.settings, "settings").get("pipeline")
        if not stages or stages.get("as_data_parallel"):
            return None, ""
        return decode(Plan, stages["plan"], f"{folder.settings}: pipeline.plan"), ""
    except (ArtefactError, AttributeError, KeyError) as error:
        reason = str(error) if isinstance(error, ArtefactError) else f"{folder.settings}: no pipeline.plan"
        return None, f"not shown: {reason}; perhaps another version of Plait wrote it"
