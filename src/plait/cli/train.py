"""`plait train`: run a job on its workers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.core.errors import JobError
from plait.core.shown import shown
from plait.core.yaml_text import YamlError, load_yaml
from plait.launcher.run_dir import RunDir, RunKind
from plait.schema.results import RunResult, SweepResult

if TYPE_CHECKING:
    from plait.schema.job import Job

STOPPED = 130

WorkersOption = Annotated[int | None, typer.Option("-np", help="Number of workers on this host.")]
HostsOption = Annotated[str | None, typer.Option("-H", help="Hosts and their workers: w0:2,w1:2.")]
NicOption = Annotated[str | None, typer.Option(help="Network interface that the hosts share.")]
OnOption = Annotated[
    str | None, typer.Option(help="Who provides the hosts: local, ssh (with -H), slurm or ray.")
]
NodesOption = Annotated[str | None, typer.Option(help="Number of hosts: 2, or the fewest and the most: 1:4.")]
SubmitFlag = Annotated[
    bool, typer.Option("--submit", help="With --on slurm: queue this command as a batch job.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: optimizer.lr=0.1 (repeatable).")
]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no worker output.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def train(
    job: Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)],
    workers: WorkersOption = None,
    hosts: HostsOption = None,
    plan: Annotated[str | None, typer.Option(help="A plan file, auto, model-parallel.")] = None,
    nic: NicOption = None,
    on: OnOption = None,
    nodes: NodesOption = None,
    submit: SubmitFlag = False,
    slow: Annotated[
        list[str] | None, typer.Option(help="Make a worker slower: 1:4, worker 1 four times (repeatable).")
    ] = None,
    jitter: Annotated[
        str | None, typer.Option(help="Sleep at random: 0.1:0.5, half a second in a tenth of the steps.")
    ] = None,
    adapt: Annotated[
        list[str] | None,
        typer.Option(
            help="Let a policy change the job: topology, '{kind: batch-size, most: 512}' (repeatable)."
        ),
    ] = None,
    set_: SetOption = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last run's newest checkpoint.")] = False,
    run: Annotated[
        str | None, typer.Option(help="The run folder to use or, with --resume, go on in.")
    ] = None,
    quiet: QuietFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Train a job.

    Example: plait train examples/digits.yaml -np 2 --set optimizer.lr=0.05
    """
    from plait.jobs.train import train as train_job
    from plait.report.terminal import RunDisplay
    from plait.schema.job import read_job

    chosen = [("parallel.plan", plan)] if plan is not None else []
    slowed = slow_overrides(slow or [], jitter)
    with os_errors_as_messages():
        asked = read_job(
            job,
            [
                *(set_ or []),
                *chosen,
                *placement_overrides(workers, hosts, nic, on, nodes),
                *slowed,
                *adapt_overrides(adapt),
            ],
        )
        if submit:
            submit_run(asked, run, resume, json_)
            return
        with RunDisplay(quiet or json_) as display:
            result = train_job(asked, resume=resume, run_folder=run, display=display)
    end_run(result, lambda: show_result(result), quiet, json_)


def placement_overrides(
    workers: int | None,
    hosts: str | None,
    nic: str | None,
    on: str | None = None,
    nodes: str | None = None,
) -> list[tuple[str, Any]]:
    """The overrides of `-np`, `-H`, `--nic`, `--on` and `--nodes`."""
    from plait.schema.job_checks import ON_THIS_HOST

    if workers is not None and hosts is not None:
        raise JobError("-np and -H: found both; -H already says how many workers each host holds")
    overrides: list[tuple[str, Any]] = []
    if workers is not None:
        overrides += [("parallel.workers", workers), *ON_THIS_HOST]
    if hosts is not None:
        overrides += [("cluster.hosts", hosts.split(",")), ("parallel.workers", None)]
    if nic is not None:
        overrides.append(("cluster.nic", nic))
    if workers is not None and (on or "local") != "local":
        raise JobError("-np and --on: found both; say how many workers each host has with cluster.slots")
    if on is not None:
        overrides.append(("cluster.on", on))
        if on in ("slurm", "ray") and hosts is None:
            # They say which hosts there are, in place of what the job says.
            overrides += [("cluster.hosts", []), ("parallel.workers", None)]
    if nodes is not None:
        overrides.append(("cluster.nodes", nodes))
    return overrides


def submit_run(job: Job, run: str | None, resume: bool, json_: bool) -> None:
    """Queue this command, without --submit, in the run's folder, and print what was queued."""
    from plait.launcher.launchers.slurm import submit

    queued = submit(job, sys.argv[1:], run, resume)
    if json_:
        print(json.dumps(queued))
    else:
        print(f"queued as Slurm job {queued['job']}; its output: {queued['output']}")
        print(f"wrote {queued['script']}; next: squeue -j {queued['job']}, plait status {queued['run']}")


def slow_overrides(slow: list[str], jitter: str | None) -> list[tuple[str, Any]]:
    """The overrides of `--slow` and `--jitter`."""
    overrides: list[tuple[str, Any]] = []
    if slow:
        pairs = [_numbers("--slow", text, "worker:times, such as 1:4") for text in slow]
        overrides.append(("parallel.slow", {int(rank): times for rank, times in pairs}))
    if jitter is not None:
        pair = _numbers("--jitter", jitter, "probability:seconds, such as 0.1:0.5")
        overrides.append(("parallel.jitter", list(pair)))
    return overrides


def adapt_overrides(policies: list[str] | None) -> list[tuple[str, Any]]:
    """The overrides of `--adapt`: a kind alone, or a kind with its options as YAML."""
    parsed: list[Any] = []
    for text in policies or []:
        try:
            value = load_yaml(text)
        except YamlError as failure:
            raise JobError(f"--adapt: found {shown(text)}, expected a YAML value ({failure})") from None
        parsed.append({"kind": value} if isinstance(value, str) else value)
    return [("adapt", parsed)] if parsed else []


def _numbers(flag: str, text: str, expected: str) -> tuple[float, float]:
    first, _, second = text.partition(":")
    try:
        pair = float(first), float(second)
    except ValueError:
        raise JobError(f"{flag}: found {shown(text)}, expected {expected}") from None
    if not all(map(math.isfinite, pair)) or (flag == "--slow" and not pair[0].is_integer()):
        raise JobError(f"{flag}: found {shown(text)}, expected {expected}")
    return pair


def show_warnings(warnings: Sequence[str], quiet: bool) -> None:
    """Print the warnings of a quiet run; otherwise they were displayed while it ran."""
    for text in warnings if quiet else ():
        print(f"warning: {text}", file=sys.stderr)


def end_run(result: RunResult | SweepResult, show: Callable[[], None], quiet: bool, json_: bool) -> None:
    """Print the result, in words by `show`; exits if the run was stopped or has failed."""
    if json_:
        print(json.dumps(result.to_dict()))
    else:
        show_warnings(result.warnings, quiet)
        show()
    if status := {"stopped": STOPPED, "failed": 1}.get(result.reason):
        raise typer.Exit(status)


def show_result(result: RunResult) -> None:
    """Print the result table and the next command."""
    from plait.report.terminal import print_table, result_table

    folder = RunDir(Path(result.run))
    print_table(result_table(result))
    if result.reason == "stopped":
        print(f"stopped; go on with: {RunKind.TRAIN.resume_command(folder.path, folder.job)}")
        return
    if result.reason == "early-stop":
        print("ended early: the watched metric stopped improving")
    print(f"wrote {folder.path}; next: plait evaluate {folder.path}")
