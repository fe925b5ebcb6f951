"""What every experiment is made of: a world of workers, rounds in turn, rows, and claims made before.

A claim that does not hold is shown as such; nothing is left out.
"""

from __future__ import annotations

import inspect
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from plait.core.codec import encode
from plait.core.errors import DataError
from plait.core.events import Recorded, read
from plait.core.files import write_output
from plait.core.names import resolve
from plait.core.shown import shortened
from plait.core.units import count_of, show_cell
from plait.launcher.display import Display
from plait.launcher.messages import Launch
from plait.launcher.run_dir import RunDir
from plait.launcher.supervisor import Supervisor
from plait.report.outputs.tables import columns_of, table_text
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import Placement

if TYPE_CHECKING:
    from plait.launcher.worker_process import Worker

T = TypeVar("T")
Cell = str | int | float | bool | None
Row = dict[str, Cell]

# Lines of progress begin with this, also those of workers, among the rest of what they print.
SAYS = "plait bench: "


def say(text: str) -> None:
    """Show how far an experiment has come, on standard error; of the workers of a group, the first does."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{SAYS}{text}", file=sys.stderr, flush=True)


class WorkersProgress(Display):
    """Shows what workers `say`, and nothing else that they print."""

    def printed(self, line: str) -> None:
        _, says, text = line.partition(SAYS)
        if says:
            say(text)


@dataclass(frozen=True)
class BenchClaim:
    """Something said before measuring: in words, with the number found, the goal, and whether it holds.

    `unresolved` is why it cannot be told: the repeats lie on both sides of the goal, or something to measure
    it is missing here.
    """

    claim: str
    value: float | None
    goal: str
    holds: bool
    unresolved: str = ""

    def render(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g}"
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        return (
            f"[{'not resolved' if self.unresolved else verdict}] {self.claim}: {value} (goal: {self.goal})"
            f"{self.unresolved and f': {self.unresolved}'}"
        )


# The least and the most of the repeats of a claim's value.
Ends = tuple[float, float]


def _unresolved(ends: Ends | None, holds: Callable[[float], bool]) -> str:
    if ends is None or len({holds(end) for end in ends}) == 1:
        return ""
    return f"the repeats are {ends[0]:.4g} to {ends[1]:.4g}, on both sides of the goal"


def at_least(
    claim: str, value: float | None, goal: float, more: str = "", ends: Ends | None = None
) -> BenchClaim:
    holds = value is not None and value >= goal
    unresolved = _unresolved(ends, lambda end: end >= goal)
    return BenchClaim(claim, value, f"at least {goal:g}{more}", holds, unresolved)


def at_most(
    claim: str,
    value: float | None,
    goal: float,
    more: str = "",
    only_if: bool = True,
    ends: Ends | None = None,
) -> BenchClaim:
    holds = only_if and value is not None and value <= goal
    unresolved = _unresolved(ends, lambda end: end <= goal)
    return BenchClaim(claim, value, f"at most {goal:g}{more}", holds, unresolved)


def within(claim: str, value: float, goal: float, ends: Ends | None = None) -> BenchClaim:
    """At most `goal` above or below zero."""
    unresolved = _unresolved(ends, lambda end: abs(end) <= goal)
    return BenchClaim(claim, value, f"at most {goal:g} either way", abs(value) <= goal, unresolved)


def of_runs(
    kind: Callable[..., BenchClaim], claim: str, values: Iterable[float | None], goal: float, more: str = ""
) -> BenchClaim:
    """A claim (`at_most`, `at_least`) of the median of several runs, with their range.

    Its value is None where a run has none.
    """
    of_each = list(values)
    measured = [value for value in of_each if value is not None]
    if not measured or len(measured) < len(of_each):
        return kind(claim, None, goal, more)
    ends = min(measured), max(measured)
    words = f"{claim} ({ends[0]:.3g} to {ends[1]:.3g} in {count_of(len(measured), 'run')})"
    return kind(words, statistics.median(measured), goal, more, ends=ends)


def this_machine() -> dict[str, Cell]:
    """What the numbers were measured on."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": _gpu(),
        "load": round(os.getloadavg()[0], 1),
    }


def _gpu() -> str | None:
    """The name of the GPU, where an experiment has loaded torch and there is one."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None


def these_versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("plait", "torch", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@dataclass(frozen=True)
class Bench:
    """A finished experiment: `rows` are flat records, one for each measured case.

    `seed` is that of all random numbers, or the first of several, which the rows name.
    """

    name: str
    command: str
    rows: Sequence[Row]
    claims: Sequence[BenchClaim]
    seed: int = 0
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    machine: dict[str, Cell] = field(default_factory=this_machine)
    versions: dict[str, str] = field(default_factory=these_versions)

    @property
    def holds(self) -> bool:
        """Whether no claim is found not to hold."""
        return all(claim.holds or claim.unresolved for claim in self.claims)

    def as_json(self) -> Mapping[str, Any]:
        """What `plait bench NAME --json` prints; a claim that is resolved has no `unresolved`."""
        data = encode(self)
        for claim in data["claims"]:
            if not claim["unresolved"]:
                del claim["unresolved"]
        keys = ("name", "machine", "versions", "command", "seed", "date", "rows", "claims")
        return {key: data[key] for key in keys}

    def render(self) -> str:
        """The rows as a table, then each claim with its verdict."""
        setting = "; ".join(
            ", ".join(f"{name} {value}" for name, value in of.items() if value is not None)
            for of in (self.machine, self.versions, {"seed": self.seed})
        )
        lines = [f"{self.name}: {self.command}", f"{setting}; {self.date}", "", table(self.rows), ""]
        return "\n".join([*lines, *(claim.render() for claim in self.claims)])

    def write_csv(self, path: Path) -> None:
        """Write the rows as a CSV file."""
        write_output(path, table_text(columns_of(self.rows), self.rows))


Found = tuple[list[Row], list[BenchClaim]]


def run_parts(
    name: str, command: str, parts: Sequence[str], known: Mapping[str, Callable[[], Found]], column: str = ""
) -> Bench:
    """The parts asked for, one after the other, as one experiment; `column` has which part a row is of."""
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    for index, part in enumerate(parts, 1):
        say(f"{name}, {part} ({index} of {len(parts)})")
        found, claimed = known[part]()
        rows += [{column: part, **row} if column else row for row in found]
        claims += claimed
    return Bench(name, command, rows, claims)


def table(rows: Sequence[Row]) -> str:
    """Rows with aligned columns; the columns are those of all rows, in order of appearance."""
    columns = columns_of(rows)
    cells = [columns, *([show_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(shown)


def number(row: Row, column: str) -> float:
    """A cell of a row as a number, zero where there is none."""
    return float(row.get(column) or 0)


def spread(values: Sequence[float], column: str) -> Row:
    """Repeats of a measurement as three columns: their median, the least (`_min`) and the most (`_max`)."""
    return {column: statistics.median(values), f"{column}_min": min(values), f"{column}_max": max(values)}


def ends_of(row: Row, column: str) -> Ends:
    """The least and the most of a column that has its `spread`."""
    return number(row, f"{column}_min"), number(row, f"{column}_max")


def ends_of_ratio(row: Row, other: Row, column: str) -> Ends:
    """The least and the most that a column of one row can be over that of another."""
    (least, most), (least_other, most_other) = ends_of(row, column), ends_of(other, column)
    return least / most_other, most / least_other


def of_repeats(rows: Sequence[Row], case: Sequence[str], measured: Sequence[str]) -> list[Row]:
    """One row for each case, as these columns name it, with the `spread` of what its repeats measured."""
    repeats: dict[tuple[Cell, ...], list[Row]] = {}
    for each in rows:
        repeats.setdefault(tuple(each[column] for column in case), []).append(each)
    merged = []
    for own in repeats.values():
        row: Row = {}
        for column, first in own[0].items():
            repeated = [each[column] for each in own if column in measured and each[column] is not None]
            row |= spread([float(value or 0) for value in repeated], column) if repeated else {column: first}
        merged.append({**row, "repeats": len(own)})
    return merged


def in_turns(sides: Mapping[str, Callable[[bool], T]], rounds: int) -> dict[str, list[T]]:
    """What each side measured in `rounds` rounds, after one that warms up and is not counted.

    The sides take turns, so that whatever else the machine does meets all of them, in another order each
    round: what follows a side is not always the same. They are told whether the round counts.
    """
    taken: dict[str, list[T]] = {name: [] for name in sides}
    names = list(sides)
    for round_ in range(rounds + 1):
        turn = f"round {round_} of {rounds}" if round_ else "warming up"
        say(f"{count_of(len(names), 'side')} in turn, {turn}")
        for name in names:
            found = sides[name](round_ > 0)
            taken[name] += [found] if round_ else []
        names = [*names[1:], names[0]]
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

    The function's module and those that `preload` names are imported once, before the workers are forked.
    Unless `joined`, the workers have no process group yet.
    """
    module = inspect.getmodule(function)
    assert module is not None
    assert module.__spec__ is not None  # the name by which others import it, also where it is run
    own = module.__spec__.name
    placement = workers(place) if isinstance(place, int) else place
    order = {"function": f"{own}:{function.__qualname__}", "asked": dict(asked), "joined": joined}
    with tempfile.TemporaryDirectory() as logs:
        launch = Launch(placement, f"{__name__}:be_worker", order, Path(logs), preload=(own, *preload))
        say(f"{placement.workers} workers: {function.__name__} {_short(asked)}".rstrip())
        found = Supervisor(launch, WorkersProgress()).run()
    return {rank: result["found"] for rank, result in found.items()}


def _short(asked: Mapping[str, Any]) -> str:
    return shortened(", ".join(f"{name} {value}" for name, value in asked.items()))


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
