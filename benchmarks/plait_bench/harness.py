"""What every experiment returns: rows that were measured, and claims that were made before.

A claim that does not hold is shown as such; nothing is left out.
"""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from plait.core.codec import encode
from plait.core.files import write_output

Cell = str | int | float | bool | None
Row = dict[str, Cell]


@dataclass(frozen=True)
class BenchClaim:
    """Something said before measuring: in words, with the number found, the goal, and whether it holds."""

    claim: str
    value: float | None
    goal: str
    holds: bool


@dataclass(frozen=True)
class Bench:
    """A finished experiment: `rows` are flat records, one for each measured case."""

    name: str
    command: str
    rows: tuple[Row, ...]
    claims: tuple[BenchClaim, ...]
    machine: dict[str, Cell] = field(default_factory=lambda: this_machine())
    versions: dict[str, str] = field(default_factory=lambda: these_versions())

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)


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
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def as_json(bench: Bench) -> Mapping[str, Any]:
    """What `plait bench NAME --json` prints."""
    keys = ("name", "machine", "versions", "command", "rows", "claims")
    data = encode(bench)
    return {key: data[key] for key in keys}


def render(bench: Bench) -> str:
    """The rows as a table, then each claim with its verdict."""
    lines = [f"{bench.name}: {bench.command}", _setting(bench), "", table(bench.rows), ""]
    for claim in bench.claims:
        value = "not measured" if claim.value is None else f"{claim.value:.4g}"
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        lines.append(f"[{verdict}] {claim.claim}: {value} (goal: {claim.goal})")
    return "\n".join(lines)


def _setting(bench: Bench) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in bench.versions.items())
    machine = ", ".join(f"{name} {value}" for name, value in bench.machine.items())
    return f"{machine}; {versions}"


def table(rows: Sequence[Row]) -> str:
    """Rows with aligned columns; the columns are those of all rows, in order of appearance."""
    columns = _columns(rows)
    cells = [columns, *([_show(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(shown)


def write_csv(bench: Bench, path: Path) -> None:
    """Write the rows as a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(bench.rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(bench.rows)
    write_output(path, text.getvalue())


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _show(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
