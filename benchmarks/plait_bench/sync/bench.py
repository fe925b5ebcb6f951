"""How workers agree, compared: throughput with slow workers, time to a target loss, speed of sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait_bench.harness import Bench, Found, Row, run_parts, say
from plait_bench.pictures import bars, picture
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
    panels = {
        "speed": ("fraction_of_ideal", "fraction of ideal throughput"),
        "pipelines": ("fraction_of_ideal", "fraction of ideal throughput, in pipelines"),
        "convergence": ("seconds_to_target", "seconds to the target loss"),
    }
    drawn = [part for part in panels if any(row["part"] == part for row in bench.rows)]
    if not drawn:
        say("no picture: of its parts, sync draws speed, pipelines and convergence")
        return
    everywhere = list(dict.fromkeys(str(row["sync"]) for row in bench.rows))
    with picture(bench, path, (11, 4 * len(drawn)), down=len(drawn)) as axes:
        for axis, part in zip(axes, drawn):
            own = [row for row in bench.rows if row["part"] == part]
            column, label = panels[part]
            bars(axis, own, _case_of, "sync", column, everywhere)
            axis.set_ylabel(label)


def _case_of(row: Row) -> str:
    return f"{row['model']},\n{row['case']}" if "model" in row else str(row["case"])
