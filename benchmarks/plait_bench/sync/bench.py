"""How workers agree, compared: throughput with slow workers, time to a target loss, speed of sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait_bench.harness import Bench, Found, Row, run_parts
from plait_bench.pictures import draw_panels
from plait_bench.sync import bandwidth, convergence, pipelines, speed

PARTS: Mapping[str, Callable[[], Found]] = {
    "speed": speed.run,
    "pipelines": pipelines.run,
    "convergence": convergence.run,
    "bandwidth": bandwidth.run,
    "shaped": bandwidth.run_shaped,
    "overlap": bandwidth.run_overlap,
}


def run(parts: Sequence[str] = tuple(PARTS), command: str = "plait bench sync", quick: bool = False) -> Bench:
    """Measure each of `parts`; the quick course is that of fewer syncs and workers in the part `speed`."""
    if quick and "speed" in parts:
        parts = ["speed"]
    known = {**PARTS, "speed": lambda: speed.run(quick)}
    return run_parts("sync", command, parts, known, column="part")


def write_plot(bench: Bench, path: Path) -> None:
    """Fractions of ideal throughput by case, and seconds to the target, a bar for each sync."""
    columns = {
        "fraction of ideal throughput": ("speed", "fraction_of_ideal"),
        "fraction of ideal throughput, in pipelines": ("pipelines", "fraction_of_ideal"),
        "seconds to the target loss": ("convergence", "seconds_to_target"),
    }
    panels = {
        label: ([row for row in bench.rows if row["part"] == part], column)
        for label, (part, column) in columns.items()
    }
    draw_panels(bench, path, panels, _case_of, "sync")


def _case_of(row: Row) -> str:
    return f"{row['model']},\n{row['case']}" if "model" in row else str(row["case"])
