"""The display of a run: a live view on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import psutil
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plait.core.shown import printable, show_numbers
from plait.core.units import count_of, show_bytes, show_rate, show_seconds
from plait.launcher.display import Display, WorkerState
from plait.schema.hosts import LOCAL
from plait.schema.results import RunResult, show_metric, show_metrics

PLAIN_LINE_S = 5.0
# A separate thread draws the view this often, however often workers report.
REFRESH_HZ = 4.0
MEMORY_S = 2.0
MOST_HOSTS = 4


class ProgressDisplay(Display, ABC):
    """Shows progress and the output of workers on standard error: a live view if that is a terminal.

    It only uses what the supervisor receives anyway, and leaves the terminal as it was, however the run ends.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._last_line_s = 0.0
        self._workers: tuple[WorkerState, ...] = ()
        self._progress: Mapping[str, Any] = {}
        self._memory: tuple[float, int] = (-MEMORY_S, 0)

    def __enter__(self) -> Self:
        # FORCE_COLOR makes a terminal of a file.
        is_terminal = self._console.file.isatty() and self._console.is_terminal
        if is_terminal and not self._console.is_dumb_terminal and not self._quiet:
            self._live = Live(
                Text("starting"),
                console=self._console,
                transient=True,
                refresh_per_second=REFRESH_HZ,
                vertical_overflow="crop",
            )
            try:
                self._live.start()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        with contextlib.suppress(OSError):  # the terminal was closed
            try:
                live.stop()
            finally:  # also if a signal interrupted it
                self._console.show_cursor(True)

    @abstractmethod
    def _view(self) -> RenderableType:
        """What a terminal shows of the progress so far."""

    @abstractmethod
    def _line(self) -> str:
        """The progress so far as a plain line."""

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self._workers = workers
        if self._progress:
            self._show()

    def progressed(self, progress: Mapping[str, Any]) -> None:
        self._progress = progress
        self._show()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self._view())
        else:
            self._print_rarely(self._line())

    def printed(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, markup=False)

    def stopping(self) -> None:
        self.printed("stopping: finishing the step and writing a checkpoint (again to end at once)")

    def _print_rarely(self, text: str) -> None:
        if time.monotonic() - self._last_line_s > PLAIN_LINE_S:
            self._last_line_s = time.monotonic()
            self.printed(text)

    def _facts(self) -> list[str]:
        """Lines about the workers, the stages, idle time and memory, and the last change."""
        progress = self._progress
        parts = [describe_workers(self._workers)] if self._workers else []
        if "idle_share" in progress:
            parts.append(f"{progress['idle_share']:.0%} idle")
        if memory := progress.get("memory_bytes"):
            parts.append(f"{show_bytes(memory)} a worker")
        elif memory := self._memory_bytes():
            parts.append(f"{show_bytes(memory)} of memory")
        lines = ["  ".join(parts)]
        if progress.get("stages"):
            lines.append(describe_stages(progress["stages"], progress["pipelines"]))
        if "change" in progress:
            lines.append(f"last change: {progress['change']}")
        return [printable(line).replace("\n", " ") for line in lines]

    def _memory_bytes(self) -> int:
        """The resident memory of the workers of this host, which is read from time to time."""
        read_at, memory = self._memory
        if time.monotonic() - read_at >= MEMORY_S:
            memory = sum(_resident_bytes(worker.pid) for worker in self._workers if worker.host == LOCAL)
            self._memory = (time.monotonic(), memory)
        return memory


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, ValueError):  # it has ended
        return 0


class RunDisplay(ProgressDisplay):
    """Shows a run: a live view on a terminal, otherwise a line every few seconds."""

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self._last_line_s = time.monotonic()
        super().started(workers)

    def _line(self) -> str:
        return describe(self._progress)

    def _view(self) -> RenderableType:
        progress, facts = self._progress, self._facts()
        bar = Table.grid(padding=(0, 2))
        bar.add_column(no_wrap=True)
        bar.add_column(no_wrap=True, overflow="ellipsis")
        total = progress["steps"]
        bar.add_row(
            ProgressBar(total=total, completed=progress["step"], pulse=total is None, width=20), facts[0]
        )
        return Group(one_line(describe(progress)), bar, *map(one_line, facts[1:]))


def one_line(text: str) -> Text:
    """The text, cut at the terminal's width."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def describe_workers(workers: Sequence[WorkerState]) -> str:
    """`4 workers on w0 (0-1), w1 (2-3)`"""
    hosts: dict[str, list[int]] = {}
    for worker in workers:
        hosts.setdefault(worker.host, []).append(worker.rank)
    if not 1 < len(hosts) <= MOST_HOSTS:
        where = ", ".join(hosts) if len(hosts) <= 1 else f"{len(hosts)} hosts"
    else:
        where = ", ".join(f"{host} ({show_numbers(ranks)})" for host, ranks in hosts.items())
    return f"{count_of(len(workers), 'worker')} on {where}"


def describe_stages(stages: Sequence[Sequence[int]], pipelines: int) -> str:
    """`2 stages on workers 0-1 | 2, in 2 pipelines`"""
    many = f", in {count_of(pipelines, 'pipeline')}" if pipelines > 1 else ""
    return f"{count_of(len(stages), 'stage')} on workers {' | '.join(map(show_numbers, stages))}{many}"


class ScriptDisplay(RunDisplay):
    """Shows a script, as torchrun and mpirun do: what workers write to standard output goes to it here."""

    def wrote(self, line: str) -> None:
        # A progress bar on the same terminal stays below the lines.
        if self._live is not None and sys.stdout.isatty():
            self.printed(line)
        elif not self._quiet:
            print(line, flush=True)


def describe(progress: Mapping[str, Any], is_going_on: bool = True) -> str:
    """`step 40/120  loss 0.41  test accuracy 93.1%  5120 samples/s  2.1 s left`; empty without progress"""
    if not progress:
        return ""
    parts = [f"step {describe_step(progress)}", *describe_metrics(progress)]
    if "samples_per_s" in progress:
        parts.append(f"{show_rate(progress['samples_per_s'])} samples/s")
    if is_going_on and "left_s" in progress:
        parts.append(f"{show_seconds(progress['left_s'])} left")
    if progress.get("failed"):
        parts.append(f"{count_of(len(progress['failed']), 'trial')} failed")
    return "  ".join(parts)


def describe_step(progress: Mapping[str, Any]) -> str:
    """`40/120`, or `40` of a stream of unknown length"""
    return f"{progress['step']}" if progress["steps"] is None else f"{progress['step']}/{progress['steps']}"


def describe_metrics(progress: Mapping[str, Any]) -> list[str]:
    """The training loss and the results on the test split, whose loss is left out if there are others."""
    parts = [f"loss {show_metric('loss', progress['loss'])}"] if "loss" in progress else []
    test = {key.removeprefix("test_"): progress[key] for key in progress if key.startswith("test_")}
    named = [name for name in test if name != "loss"] or list(test)
    return [*parts, *(f"test {name} {show_metric(name, test[name])}" for name in named)]


def runs_table(rows: Sequence[Mapping[str, Any]], now: float) -> str:
    """Runs as `plait status` lists them: name, state, step, results, workers, age.

    As text: a table of rich takes seconds for thousands of runs.
    """
    lines = [["run", "state", "step", "results", "workers", "updated"]]
    for row in rows:
        progress, workers = row.get("progress") or {}, row.get("workers", [])
        results = [f"{progress['ended']}/{progress['trials']} trials ended"] if "trials" in progress else []
        alive = sum(worker["alive"] for worker in workers)
        cells = [
            row["name"],
            row["state"],
            describe_step(progress) if progress else "-",
            "  ".join([*results, *describe_metrics(progress)]) or "-",
            f"{alive} of {len(workers)} alive" if alive else str(len(workers) or "-"),
            f"{show_seconds(max(0.0, now - row['updated']))} ago",
        ]
        lines.append([printable(cell).replace("\n", " ") for cell in cells])
    widths = [max(map(cell_len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(set_cell_size, line, widths)).rstrip() for line in lines)


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
