"""`plait sweep`: many trials of a job as fused arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.train import (
    HostsOption,
    JsonFlag,
    NicOption,
    NodesOption,
    OnOption,
    QuietFlag,
    SetOption,
    SubmitFlag,
    WorkersOption,
    end_run,
    placement_overrides,
    submit_run,
)
from plait.core.codec import decode
from plait.core.errors import InputError
from plait.core.shown import show_numbers, shown
from plait.core.units import count_of, show_rate, show_seconds
from plait.launcher.run_dir import RunDir, RunKind
from plait.report.terminal import ProgressDisplay, describe, one_line, print_table
from plait.schema.placement import ElasticRules, WorkerLimits
from plait.schema.results import ArrayResult, SweepResult, TrialResult, show_metric, show_value
from plait.schema.settings import SEARCHES, SearchSettings

MAX_ROWS = 20


def sweep(
    job: Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)],
    over: Annotated[
        list[str] | None,
        typer.Option(help="What to try: optimizer.lr=log:1e-4:1e-1:16 or KEY=V1,V2 (repeatable)."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(SEARCHES)}; unset: {SearchSettings.kind}.", show_default=False),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="How many trials to draw, where they are drawn.")] = None,
    width: Annotated[int | None, typer.Option(help="Trials an array; unset: as many as fit and pay.")] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Workers that train each array together, on shares of its batches; with --plan, how often "
            "each stage is there; unset: 1."
        ),
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="Arrays in stages over workers: a plan file, model-parallel, auto.")
    ] = None,
    eta: Annotated[
        int | None,
        typer.Option(help=f"One in ETA trials goes on (halving, asha); unset: {SearchSettings.eta}."),
    ] = None,
    least_steps: Annotated[
        int | None, typer.Option(help="Steps before trials are first compared (halving, asha, pbt).")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="What trials are compared by; unset: the job's metric, or the loss.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help=f"Seed of the search; unset: {SearchSettings.seed}.")
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(help="A study of Optuna, by name: it draws the trials and decides which go on."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="The study's storage, sqlite:///FILE or another URL; unset: in the run."),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="The study's sampler: optuna.samplers:RandomSampler; unset: TPE.")
    ] = None,
    pruner: Annotated[
        str | None, typer.Option(help="The study's pruner: optuna.pruners:HyperbandPruner; unset: median.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="cpu:4 or cuda:2: that many workers; cuda: one for each GPU.")
    ] = None,
    workers: WorkersOption = None,
    hosts: HostsOption = None,
    nic: NicOption = None,
    on: OnOption = None,
    nodes: NodesOption = None,
    submit: SubmitFlag = False,
    set_: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with the sweep in this run folder; --width, --replicas, --trials may change."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="The run folder to use.")] = None,
    quiet: QuietFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Train trials of a job with different values, fused, and rank them.

    Example: plait sweep examples/digits.yaml --over optimizer.lr=log:1e-3:1:8 --set epochs=1
    """
    _check_asked(over, resume, [*(set_ or []), *(["parallel.plan"] if plan is not None else [])])
    from plait.jobs.sweep import sweep as run_sweep
    from plait.schema.job import read_job

    where = [*placement_overrides(workers, hosts, nic, on, nodes), *_on_devices(devices, workers, hosts)]
    chosen = [("parallel.plan", plan)] if plan is not None else []
    asked = read_job(job, [*(set_ or []), *chosen, *where])
    if submit:
        submit_run(asked, run if resume is None else resume, resume is not None, json_)
        return
    with os_errors_as_messages(), SweepDisplay(quiet or json_) as display:
        result = run_sweep(
            asked,
            over or [],
            search=search,
            trials=trials,
            width=width,
            replicas=replicas,
            eta=eta,
            least_steps=least_steps,
            metric=metric,
            seed=seed,
            study=study,
            storage=storage,
            sampler=sampler,
            pruner=pruner,
            resume=resume,
            run_folder=run,
            display=display,
        )
    end_run(result, lambda: show_result(result, job), quiet, json_)


def _on_devices(devices: str | None, workers: int | None, hosts: str | None) -> list[tuple[str, Any]]:
    """The overrides of `--devices`."""
    if devices is None:
        return []
    kind, _, count = devices.partition(":")
    if kind not in ("cpu", "cuda") or (count and not re.fullmatch("[1-9][0-9]{0,8}", count)):
        raise InputError(f"--devices: found {shown(devices)}, expected cpu, cuda, cpu:N or cuda:N")
    if (workers is not None or hosts is not None) and count:
        raise InputError("--devices: -np or -H already say how many workers there are; give the kind alone")
    if not count and kind == "cuda" and workers is None and hosts is None:
        import torch

        count = str(max(1, torch.cuda.device_count()))
    from plait.schema.job_checks import ON_THIS_HOST

    here: list[tuple[str, Any]] = [("parallel.workers", int(count)), *ON_THIS_HOST] if count else []
    return [("device", kind), *here]


def _check_asked(over: list[str] | None, resume: str | None, overrides: list[str]) -> None:
    """Refuse a sweep over nothing, and other values or overrides of one that goes on.

    It may be told where its workers run.
    """
    if resume is None:
        if not over:
            raise InputError(
                "--over: found none, expected one or more, such as optimizer.lr=log:1e-4:1e-1:16"
            )
        return
    if over:
        raise InputError("--over and --resume: found both; a sweep goes on with what it was asked to try")
    placed = {"workers", "elastic", *(each.name for each in (*fields(ElasticRules), *fields(WorkerLimits)))}
    for key in [each.partition("=")[0] for each in overrides]:
        section, _, name = key.partition(".")
        if section not in ("cluster", "run_dir") and not (section == "parallel" and name in placed):
            raise InputError(
                f"{key} and --resume: found both; a sweep goes on with the job that it was begun with, and "
                f"--width, --replicas, --trials, -np may change: leave it out, or begin another"
            )


class SweepDisplay(ProgressDisplay):
    """Shows a sweep: a live table on a terminal, otherwise a line every few seconds."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        # The printed arrays: whether fused, and why.
        self._arrays: dict[int, tuple[bool, str]] = {}
        self._failed: set[str] = set()

    def progressed(self, progress: Mapping[str, Any]) -> None:
        for array in [decode(ArrayResult, each) for each in progress.get("arrays", [])]:
            known = (array.fused, array.why)
            if self._arrays.get(array.number) != known:
                self._arrays[array.number] = known
                self.printed(describe_array(array))
        for trial, why in progress.get("failed", {}).items():
            if trial not in self._failed:
                self._failed.add(trial)
                self.printed(f"trial {trial} failed: {why}")
        super().progressed(progress)

    def _line(self) -> str:
        return describe_sweep(self._progress)

    def _view(self) -> RenderableType:
        rows = [TrialResult.of_plain(row) for row in self._progress["rows"]]
        return Group(*map(one_line, [self._line(), *self._facts()]), trials_table(rows))


def describe_sweep(progress: Mapping[str, Any]) -> str:
    """`12/32 trials ended  step 4100/9600  5120 steps/s  2.1 s left`"""
    parts = [f"{progress['ended']}/{progress['trials']} trials ended", describe(progress)]
    if progress.get("trial_steps_per_s"):
        parts.append(f"{show_rate(progress['trial_steps_per_s'])} trial steps/s")
    return "  ".join(parts)


def describe_array(array: ArrayResult) -> str:
    """`trials 0-7 train fused on worker 0` or `trial 8 trains alone on worker 0: optimizer.kind ...`"""
    trials, why = array.trials, f": {array.why}" if array.why else ""
    one = len(trials) == 1
    what = f"trial{'' if one else 's'} {show_numbers(trials)} train{'s' if one else ''}"
    how = f"fused, {array.most} at once," if array.fused else "alone" if one else "one by one"
    return f"{what} {how} on worker {array.worker}{why}"


def trials_table(rows: Sequence[TrialResult]) -> Table:
    """Trials, best first, one column for each key and metric."""
    table = Table(box=None, pad_edge=False)
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    names = [*_short(keys), *(f"test {name}" for name in metrics)]
    for column in ("trial", *names, "training loss", "steps", "state"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            str(row.trial),
            # Values may hold square brackets, which are markup to the table.
            *(escape(show_value(row.values.get(key, "-"))) for key in keys),
            *(show_metric(name, row.metrics[name]) if name in row.metrics else "-" for name in metrics),
            "-" if row.train_loss is None else show_metric("loss", row.train_loss),
            str(row.step),
            row.state,
        )
    return table


def _short(keys: list[str]) -> list[str]:
    """The last part of each key if it is unique, otherwise the whole key."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends)]


def show_result(result: SweepResult, job: Path) -> None:
    """Print the trials, best first, and the next command."""
    folder = RunDir(Path(result.run))
    print_table(trials_table(result.trials[:MAX_ROWS]))
    if len(result.trials) > MAX_ROWS:
        print(f"and {len(result.trials) - MAX_ROWS} more in {folder.path}/trials.csv")
    failed = [row for row in result.trials if row.state == "failed"]
    for row in failed[:MAX_ROWS]:
        print(f"trial {row.trial} failed: {row.why}")
    if failed:
        print(f"the errors with their frames are in {folder.path}/failures")
    for array in result.arrays[:MAX_ROWS]:
        print(describe_array(array))
    if len(result.arrays) > MAX_ROWS:
        print(f"and {len(result.arrays) - MAX_ROWS} more arrays (--json lists them)")
    workers = count_of(result.workers, "worker")
    rate = f"{show_rate(result.trial_steps_per_s)} trial steps/s on {workers}"
    print(f"{result.step} of {result.steps} trials in {show_seconds(result.seconds)}, {rate}")
    if result.reason == "stopped":
        print(f"stopped; go on with: {RunKind.SWEEP.resume_command(folder.path, job)}")
        return
    names = ("trials.csv", "curves.png", "sweep.html", "adapter")
    files = [name for name in names if (folder.path / name).exists()]
    further = "" if result.best is None else f"; next: plait evaluate {folder.path}"
    print(f"wrote {folder.path} ({', '.join(files)}){further}")
