"""`plait check`: whether a job will work, and what it will take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.train import (
    HostsOption,
    JsonFlag,
    NicOption,
    SetOption,
    WorkersOption,
    placement_overrides,
    show_warnings,
)
from plait.core.units import count_of, show_bytes, show_seconds
from plait.schema.results import show_metric, show_metrics

if TYPE_CHECKING:
    from plait.jobs.check import CheckReport


def check(
    job: Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)],
    workers: WorkersOption = None,
    hosts: HostsOption = None,
    nic: NicOption = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to try.")] = 8,
    set_: SetOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Try a few steps and one evaluation of a job on its workers: will it work, and how long will it take?

    Example: plait check examples/digits.yaml -np 2
    """
    from plait.jobs.check import check as check_job
    from plait.report.terminal import RunDisplay
    from plait.schema.job import read_job

    with os_errors_as_messages():
        asked = read_job(job, [*(set_ or []), *placement_overrides(workers, hosts, nic)])
        with RunDisplay(quiet or json_) as display:
            report = check_job(asked, steps=steps, display=display)
    if json_:
        print(json.dumps(report.to_dict()))
        return
    show_warnings(report.warnings, quiet)
    _show(report)
    print(f"nothing was kept; next: plait train {os.fspath(job)}")


def _show(report: CheckReport) -> None:
    from rich.table import Table

    from plait.report.terminal import print_table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("model", f"{report.model}, {count_of(report.parameters, 'parameter')}")
    samples = "a stream" if report.samples is None else count_of(report.samples, "sample")
    same = f", the same on all {report.workers} workers" if report.workers > 1 else ""
    table.add_row("data", f"{samples} in batches of {report.batch_size}{same}")
    first, last = (show_metric("loss", loss) for loss in report.losses)
    table.add_row("training loss", f"{first} in the first step, {last} in step {report.steps}")
    table.add_row("test", show_metrics(report.test) if report.test else "no test split")
    if report.audited_steps:
        table.add_row("audit", f"{count_of(report.audited_steps, 'step')} as plain PyTorch takes them")
    table.add_row("memory", f"{show_bytes(report.memory_bytes)} at most, worker 0 ({report.device})")
    table.add_row("step", show_seconds(report.step_s))
    if report.evaluation_s is not None:
        table.add_row("evaluation", show_seconds(report.evaluation_s))
    table.add_row("checkpoint", show_seconds(report.checkpoint_s))
    whole = "unknown: the stream has no length, and epochs are asked for"
    if report.run_s is not None and report.run_steps is not None:
        whole = f"{show_seconds(report.run_s)} for {count_of(report.run_steps, 'step')}"
    table.add_row("whole run", whole)
    print_table(table)
