"""The display of a run: a live line on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from plait.core.units import count_of, show_rate, show_seconds
from plait.launcher.display import Display, WorkerState
from plait.schema.results import RunResult, show_metric, show_metrics

PLAIN_LINE_S = 5.0


class ProgressDisplay(Display, ABC):
    """Shows progress and the output of workers on standard error; on a terminal by `_live`."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Progress | Live | None = None
        self._last_line_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live = self._make_live()
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @abstractmethod
    def _make_live(self) -> Progress | Live:
        """The live display for a terminal."""

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self._last_line_s = time.monotonic()

    def printed(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, markup=False)

    def stopping(self) -> None:
        self.printed("stopping: finishing the step and writing a checkpoint (again to end at once)")

    def _print_rarely(self, text: str) -> None:
        if time.monotonic() - self._last_line_s > PLAIN_LINE_S:
            self._last_line_s = time.monotonic()
            self.printed(text)


class RunDisplay(ProgressDisplay):
    """Shows a run: a progress bar on a terminal, otherwise a line every few seconds."""

    def _make_live(self) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[numbers]}"),
        )
        progress = Progress(*columns, console=self._console, transient=True)
        progress.add_task("starting", total=None, numbers="")
        return progress

    def progressed(self, progress: Mapping[str, Any]) -> None:
        text = describe(progress)
        if isinstance(self._live, Progress):
            total, done = progress["steps"], progress["step"]
            (task,) = self._live.task_ids
            self._live.update(task, description="training", total=total, completed=done, numbers=text)
        else:
            self._print_rarely(text)


class ScriptDisplay(RunDisplay):
    """Shows a script, as torchrun and mpirun do: what workers write to standard output goes to it here."""

    def wrote(self, line: str) -> None:
        # A progress bar on the same terminal stays below the lines.
        if self._live is not None and sys.stdout.isatty():
            self.printed(line)
        elif not self._quiet:
            print(line, flush=True)


def describe(progress: Mapping[str, Any]) -> str:
    """`step 40/120  loss 0.41  test accuracy 93.1%  5120 samples/s  2.1 s left`"""
    # A stream of unknown length has no number of steps.
    total = "" if progress["steps"] is None else f"/{progress['steps']}"
    parts = [f"step {progress['step']}{total}"]
    if "loss" in progress:
        parts.append(f"loss {show_metric('loss', progress['loss'])}")
    test = {key.removeprefix("test_"): progress[key] for key in progress if key.startswith("test_")}
    for name in [name for name in test if name != "loss"] or test:
        parts.append(f"test {name} {show_metric(name, test[name])}")
    if "samples_per_s" in progress:
        parts.append(f"{show_rate(progress['samples_per_s'])} samples/s")
    if "left_s" in progress:
        parts.append(f"{show_seconds(progress['left_s'])} left")
    if progress.get("failed"):
        parts.append(f"{count_of(len(progress['failed']), 'trial')} failed")
    return "  ".join(parts)


def result_table(result: RunResult) -> Table:
    """The result of a run as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    total = "" if result.steps is None else f" of {result.steps}"
    table.add_row("steps", f"{result.step}{total}")
    if result.train_loss is not None:
        table.add_row("training loss", show_metric("loss", result.train_loss))
    for name, value in result.test.items():
        table.add_row(f"test {name}", show_metric(name, value))
    if result.best:
        best = {k: v for k, v in result.best.items() if k != "step"}
        table.add_row("best", f"step {result.best['step']}: {show_metrics(best)}")
    table.add_row(
        "throughput",
        f"{show_rate(result.samples_per_s)} samples/s on {result.workers} x {result.device}",
    )
    table.add_row("time", show_seconds(result.seconds))
    if result.verified_s is not None:
        text = "stages compute what the plain model computes"
        table.add_row("verified", f"{text} (checked in {show_seconds(result.verified_s)})")
    return table


def print_table(table: Table) -> None:
    """Print to standard output; lines are not wrapped to a terminal's width if it is none."""
    width = None if sys.stdout.isatty() else 160
    Console(width=width, highlight=False).print(table)
