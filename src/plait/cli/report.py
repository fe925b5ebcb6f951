"""`plait report`: a run as one HTML page, a trace, tables or a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.runs import RunArgument, RunsFolder
from plait.cli.status_file import read_cause, read_status
from plait.cli.train import JsonFlag
from plait.core.artefact import read_json
from plait.core.codec import decode
from plait.core.errors import ArtefactError, InputError
from plait.core.files import write_output
from plait.core.names import check_extra
from plait.core.units import show_bytes
from plait.launcher.run_dir import RunDir, find_run
from plait.schema.settings import TrainSettings

if TYPE_CHECKING:
    from plait.schema.plans.plan import Plan

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
    host: Annotated[str, typer.Option(help="Where --watch listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port of --watch; 0: any free one.")] = 0,
    run_dir: RunsFolder = Path("runs"),
    json_: JsonFlag = False,
) -> None:
    """Write a run as one HTML page: curves, timeline, stages, replicas, adaptations, faults, trials.

    Example: plait report runs/digits-001
    """
    with os_errors_as_messages():
        if watch:
            _watch(run, run_dir, (output, trace, csv, png), host, port, json_)
            return
        folder = find_run(run, run_dir)
        if png is not None:
            check_extra("matplotlib", f"--png {png}")
        page = output or Path(f"{folder.path.absolute().name}.report.html")
        written = _write(folder, page, trace, csv, png, force)
    if json_:
        print(json.dumps({"run": str(folder.path), "files": [str(path) for path in written]}))
        return
    for path in written:
        size = f" ({show_bytes(path.stat().st_size)})" if path.is_file() else ""
        print(f"wrote {path}{size}")


def _watch(
    run: str, run_dir: Path, outputs: Sequence[Path | None], host: str, port: int, as_json: bool
) -> None:
    from plait.cli.watch import watch

    if any(path is not None for path in outputs):
        raise InputError(
            "--watch: found -o, --trace, --csv or --png, expected none of them: it writes no files"
        )
    if any(Path(run).glob("*/run.json")) and not (Path(run) / "run.json").exists():
        raise InputError(f"--watch: found {run!r}, a folder of runs, expected one run; name one of them")
    folder = find_run(run, run_dir)
    watch(folder, lambda: _plan(folder), host, port, as_json)


def _write(
    folder: RunDir, page: Path, trace: Path | None, csv: Path | None, png: Path | None, force: bool
) -> list[Path]:
    """Write what was asked for, after checking that nothing else is replaced; returns the files."""
    from plait.report.outputs import page as pages
    from plait.report.outputs import picture, tables
    from plait.report.outputs import trace as traces
    from plait.report.record import read_run
    from plait.report.run_data import make_data

    named = [path.resolve() for path in (page, trace, png) if path is not None and not path.is_char_device()]
    if len(set(named)) < len(named):
        raise InputError("-o, --trace, --png: found one file for two of them, expected a file for each")
    if not force:
        for path, mark in ((page, pages.MARK), (trace, traces.MARK), (png, picture.MARK)):
            _check_replaceable(path, mark)
    recorded = read_run(folder.path)
    state, progress = _status(folder)
    if not recorded.events and not len(recorded.ops):
        cause = read_cause(folder)
        ended = f"; it ended with: {cause}" if cause is not None else ""
        hint = f"plait train and plait sweep record some, a script does not; see: plait status {folder.path}"
        raise InputError(f"{folder.path}: it has no events ({state}){ended}; {hint}")
    name = folder.path.absolute().name
    cause = read_cause(folder) if state in ("failed", "died") else None
    data = make_data(name, recorded, _plan(folder), state, cause, progress)
    texts = {page: pages.make_page(data)}
    if trace is not None:
        texts[trace] = traces.make_trace(data, recorded.ops)
    if csv is not None:
        rows = {csv / name: text for name, text in tables.make_tables(data, recorded.ops).items()}
        for path, text in rows.items():
            if not force:
                _check_replaceable(path, text.partition("\n")[0])
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


def _status(folder: RunDir) -> tuple[str, Mapping[str, Any]]:
    """The state and the progress of a run, as far as known."""
    if not folder.status.exists():
        return "never started", {}
    try:
        content = read_status(folder)
    except ArtefactError:
        return "its status file is damaged", {}
    return content["state"], content["progress"]


def _plan(folder: RunDir) -> Plan | None:
    """The plan that a run in stages was started with."""
    if not folder.settings.exists():
        return None
    content = read_json(folder.settings, "settings")
    pipeline = decode(TrainSettings, content, str(folder.settings)).as_run().pipeline
    return pipeline.plan if pipeline is not None else None
