"""How workers agree, compared: throughput with slow workers, time to a target loss, speed of sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait_bench.harness import Bench, Found, Row, number, picture, run_parts
from plait_bench.sync import bandwidth, convergence, pipelines, speed

PARTS: Mapping[str, Callable[[], Found]] = {
    "speed": speed.run,
    "pipelines": pipelines.run,
    "convergence": convergence.run,
    "bandwidth": bandwidth.run,
    "shaped": bandwidth.run_shaped,
    "overlap": bandwidth.run_overlap,
}


def run(parts: Sequence[str] = tuple(PARTS), command: str = "plait bench sync") -> Bench:
    """Measure each of `parts`."""
    return run_parts("sync", command, parts, PARTS, column="part")


def write_plot(bench: Bench, path: Path) -> None:
    """Fractions of ideal throughput by case, and seconds to the target, a bar for each sync."""
    panels = [
        ("speed", "fraction_of_ideal", "fraction of ideal throughput"),
        ("pipelines", "fraction_of_ideal", "fraction of ideal throughput, in pipelines"),
        ("convergence", "seconds_to_target", "seconds to the target loss"),
    ]
    drawn = [panel for panel in panels if any(row["part"] == panel[0] for row in bench.rows)]
    if not drawn:
        return
    everywhere = list(dict.fromkeys(str(row["sync"]) for row in bench.rows))
    with picture(path, (11, 4 * len(drawn)), down=len(drawn)) as axes:
        for axis, (part, column, label) in zip(axes, drawn):
            own = [row for row in bench.rows if row["part"] == part]
            syncs = list(dict.fromkeys(str(row["sync"]) for row in own))
            cases = list(dict.fromkeys(_case_of(row) for row in own))
            for i, sync in enumerate(syncs):
                # A sync has one colour in all panels.
                colour = f"C{everywhere.index(sync) % 10}"
                values = {_case_of(row): number(row, column) for row in own if row["sync"] == sync}
                places = [c + 0.8 * (i - (len(syncs) - 1) / 2) / len(syncs) for c in range(len(cases))]
                heights = [values.get(case, 0.0) for case in cases]
                axis.bar(places, heights, width=0.8 / len(syncs), label=sync, color=colour)
            words = [case.replace(" ", "\n") if len(cases) > 8 else case for case in cases]
            axis.set_xticks(range(len(cases)), words, fontsize=8)
            axis.set_ylabel(label)
            axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _case_of(row: Row) -> str:
    return f"{row['model']},\n{row['case']}" if "model" in row else str(row["case"])
