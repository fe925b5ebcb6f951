"""What every experiment is made of: a world of workers, rounds in turn, rows, claims made before, a picture.

A claim that does not hold is shown as such; nothing is left out.
"""

from __future__ import annotations

import csv
import inspect
import io
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.codec import encode
from plait.core.errors import DataError
from plait.core.events import Recorded, read
from plait.core.files import write_output, write_picture
from plait.core.names import resolve
from plait.launcher.display import Silent
from plait.launcher.messages import Launch
from plait.launcher.run_dir import RunDir
from plait.launcher.supervisor import Supervisor
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import Placement

if TYPE_CHECKING:
    from plait.launcher.worker_process import Worker

Cell = str | int | float | bool | None
Row = dict[str, Cell]


@dataclass(frozen=True)
class BenchClaim:
    """Something said before measuring: in words, with the number found, the goal, and whether it holds."""

    claim: str
    value: float | None
    goal: str
    holds: bool

    def render(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g}"
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        return f"[{verdict}] {self.claim}: {value} (goal: {self.goal})"


def at_least(claim: str, value: float | None, goal: float, more: str = "") -> BenchClaim:
    return BenchClaim(claim, value, f"at least {goal:g}{more}", value is not None and value >= goal)


def at_most(claim: str, value: float | None, goal: float, more: str = "", only_if: bool = True) -> BenchClaim:
    holds = only_if and value is not None and value <= goal
    return BenchClaim(claim, value, f"at most {goal:g}{more}", holds)


def within(claim: str, value: float, goal: float) -> BenchClaim:
    """At most `goal` above or below zero."""
    return BenchClaim(claim, value, f"at most {goal:g} either way", abs(value) <= goal)


def this_machine() -> dict[str, Cell]:
    """What the numbers were measured on."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def these_versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("plait", "torch", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@dataclass(frozen=True)
class Bench:
    """A finished experiment: `rows` are flat records, one for each measured case."""

    name: str
    command: str
    rows: Sequence[Row]
    claims: Sequence[BenchClaim]
    machine: dict[str, Cell] = field(default_factory=this_machine)
    versions: dict[str, str] = field(default_factory=these_versions)

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)

    def as_json(self) -> Mapping[str, Any]:
        """What `plait bench NAME --json` prints."""
        data = encode(self)
        return {key: data[key] for key in ("name", "machine", "versions", "command", "rows", "claims")}

    def render(self) -> str:
        """The rows as a table, then each claim with its verdict."""
        setting = "; ".join(
            ", ".join(f"{name} {value}" for name, value in of.items()) for of in (self.machine, self.versions)
        )
        lines = [f"{self.name}: {self.command}", setting, "", table(self.rows), ""]
        return "\n".join([*lines, *(claim.render() for claim in self.claims)])

    def write_csv(self, path: Path) -> None:
        """Write the rows as a CSV file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, _columns(self.rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_output(path, text.getvalue())


Found = tuple[list[Row], list[BenchClaim]]


def run_parts(
    name: str, command: str, parts: Sequence[str], known: Mapping[str, Callable[[], Found]], column: str = ""
) -> Bench:
    """The parts asked for, one after the other, as one experiment; `column` has which part a row is of."""
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    for part in parts:
        found, claimed = known[part]()
        rows += [{column: part, **row} if column else row for row in found]
        claims += claimed
    return Bench(name, command, rows, claims)


def table(rows: Sequence[Row]) -> str:
    """Rows with aligned columns; the columns are those of all rows, in order of appearance."""
    columns = _columns(rows)
    cells = [columns, *([_show(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(shown)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _show(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def number(row: Row, column: str) -> float:
    """A cell of a row as a number, zero where there is none."""
    return float(row.get(column) or 0)


def spread(values: Sequence[float], middle: str, least: str, most: str) -> Row:
    """Repeats of a measurement as three columns of these names: their median, the least and the most."""
    return {middle: statistics.median(values), least: min(values), most: max(values)}


def in_turns(sides: Mapping[str, Callable[[bool], float]], rounds: int) -> dict[str, list[float]]:
    """What each side measured in `rounds` rounds, after one that warms up and is not counted.

    The sides take turns, so that whatever else the machine does meets all of them. They are told whether
    the round counts.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, side in sides.items():
            found = side(round_ > 0)
            taken[name] += [found] if round_ else []
    return taken


def seconds_of_all(work: Callable[[], object]) -> float:
    """Seconds until all workers have done `work`, which they begin together."""
    import torch.distributed as dist  # experiments without workers take no memory for it

    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def workers(count: int) -> Placement:
    """This many workers of this machine, with a thread each."""
    return Placement((Host(LOCAL, count),), threads=1)


def in_world(
    place: int | Placement,
    function: Callable[..., Any],
    asked: Mapping[str, Any],
    preload: tuple[str, ...] = (),
    joined: bool = True,
) -> dict[int, Any]:
    """What `function(worker, **asked)` returned on each rank of a new world, as JSON has it.

    `preload` names modules that are imported once, before the workers are forked. Unless `joined`, the
    workers have no process group yet.
    """
    module = inspect.getmodule(function)
    assert module is not None
    assert module.__spec__ is not None  # the name by which others import it, also where it is run
    named = f"{module.__spec__.name}:{function.__qualname__}"
    placement = workers(place) if isinstance(place, int) else place
    order = {"function": named, "asked": dict(asked), "joined": joined}
    with tempfile.TemporaryDirectory() as logs:
        launch = Launch(placement, f"{__name__}:be_worker", order, Path(logs), preload=preload)
        found = Supervisor(launch, Silent()).run()
    return {rank: result["found"] for rank, result in found.items()}


def be_worker(worker: Worker, order: dict[str, Any]) -> dict[str, Any]:
    """Be one of the workers of an experiment."""
    if order["joined"]:
        worker.join("gloo")
    return {"found": resolve(order["function"], "function")(worker, **order["asked"])}


def recorded(run: RunDir) -> list[Recorded]:
    """What was recorded of a run, by whichever worker, in the order of time."""
    lines = [line for path in sorted(run.path.glob("events/*.jsonl")) for line in read(path)]
    return sorted(lines, key=lambda line: line.t)


def english() -> Path:
    """Half a megabyte of English that comes with Python: its own reference, the topics of pydoc."""
    found = find_spec("pydoc_data.topics")
    if found is None or found.origin is None:
        raise DataError("convergence: this Python has no pydoc_data.topics, whose text is the data here")
    return Path(found.origin)


@contextmanager
def picture(
    path: Path, size: tuple[float, float], down: int = 1, across: int = 1, dpi: int = 120, **options: Any
) -> Iterator[list[Any]]:
    """Axes to draw on within; afterwards they are the PNG at `path`."""
    import matplotlib  # loaded only where a picture is asked for

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, **options)
    yield list(axes.flat)
    figure.tight_layout()
    write_picture(path, figure, dpi=dpi)
    plt.close(figure)
