"""How workers agree, compared: throughput with slow workers, time to a target loss, speed of sums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.core.files import write_picture
from plait_bench.harness import Bench, BenchClaim, Row

PARTS = {
    "speed": "the fraction of ideal throughput of each sync, 8 workers, six cases of slow workers",
    "pipelines": "the same in 2 and 4 pipelines of two stages, with a slow worker in one stage",
    "convergence": "time to a target loss on digits and on text, three seeds, with and without a slow worker",
    "bandwidth": "sums of real gradients over each topology against the backend's own, on one host",
    "shaped": "the same over four hosts, one of them behind a slow link",
    "overlap": "how much of the transfer a longer backward hides",
}


def run(parts: Sequence[str] = tuple(PARTS), command: str = "plait bench sync") -> Bench:
    """Measure each of `parts`."""
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    for part in parts:
        found, said = _measure(part)
        rows += [{"part": part, **row} for row in found]
        claims += said
    return Bench("sync", command, tuple(rows), tuple(claims))


def _measure(part: str) -> tuple[list[Row], list[BenchClaim]]:
    # Each part loads what it alone needs.
    if part == "speed":
        from plait_bench.sync.speed import speed_claims, speed_rows

        rows = speed_rows()
        return rows, speed_claims(rows)
    if part == "pipelines":
        from plait_bench.sync.pipelines import pipeline_claims, pipeline_rows

        rows = pipeline_rows()
        return rows, pipeline_claims(rows)
    if part == "convergence":
        from plait_bench.sync.convergence import convergence_claims, convergence_rows

        rows = convergence_rows()
        return rows, convergence_claims(rows)
    from plait_bench.sync import bandwidth as bandwidth

    if part == "bandwidth":
        rows = bandwidth.bandwidth_rows()
        return rows, bandwidth.bandwidth_claims(rows)
    if part == "shaped":
        rows, reason = bandwidth.shaped_rows()
        return rows, bandwidth.shaped_claims(rows, reason)
    rows = bandwidth.overlap_rows()
    return rows, bandwidth.overlap_claims(rows)


def write_plot(bench: Bench, path: Path) -> None:
    """Fractions of ideal throughput by case, and seconds to the target, a bar for each sync."""
    panels = [
        ("speed", "fraction_of_ideal", "fraction of ideal throughput"),
        ("pipelines", "fraction_of_ideal", "fraction of ideal throughput, in pipelines"),
        ("convergence", "seconds_to_target", "seconds to the target loss"),
    ]
    drawn = [panel for panel in panels if any(row["part"] == panel[0] for row in bench.rows)]
    if drawn:
        _draw(bench.rows, drawn, path)


def _draw(rows: Sequence[Row], panels: Sequence[tuple[str, str, str]], path: Path) -> None:
    import matplotlib  # loaded only where a picture is asked for

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    everywhere = list(dict.fromkeys(str(row["sync"]) for row in rows))
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 4 * len(panels)), squeeze=False)
    for axis, (part, column, label) in zip(axes[:, 0], panels):
        own = [row for row in rows if row["part"] == part]
        syncs = list(dict.fromkeys(str(row["sync"]) for row in own))
        cases = list(dict.fromkeys(_case_of(row) for row in own))
        for i, sync in enumerate(syncs):
            # A sync has one colour in all panels.
            colour = f"C{everywhere.index(sync) % 10}"
            values = {_case_of(row): float(row[column] or 0) for row in own if row["sync"] == sync}
            places = [c + 0.8 * (i - (len(syncs) - 1) / 2) / len(syncs) for c in range(len(cases))]
            heights = [values.get(case, 0.0) for case in cases]
            axis.bar(places, heights, width=0.8 / len(syncs), label=sync, color=colour)
        words = [case.replace(" ", "\n") if len(cases) > 8 else case for case in cases]
        axis.set_xticks(range(len(cases)), words, fontsize=8)
        axis.set_ylabel(label)
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    write_picture(path, figure, dpi=120)
    plt.close(figure)


def _case_of(row: Row) -> str:
    return f"{row['model']},\n{row['case']}" if "model" in row else str(row["case"])
