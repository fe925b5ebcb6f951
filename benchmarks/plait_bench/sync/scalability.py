"""Throughput of each sync over the number of workers, all of one speed: who still scales at eight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.core.files import write_picture
from plait_bench.harness import Bench, Row
from plait_bench.sync.claims import partial_reduce_claims
from plait_bench.sync.speed import speed_rows

SYNCS = (
    "all-reduce",
    "all-reduce, star",
    "partial-reduce",
    "ad-psgd",
    "pair-averaging",
    "local-sgd H=8",
    "hetpipe D=4",
)


def run(
    workers: Sequence[int] = (2, 4, 8),
    syncs: Sequence[str] = SYNCS,
    seconds: float = 3.0,
    command: str = "plait bench scalability",
) -> Bench:
    """Measure every sync with each number of workers."""
    rows: list[Row] = []
    for count in workers:
        rows += speed_rows(["homogeneous"], syncs, count, seconds)
    what = "partial reduce's fraction of ideal throughput"
    claims = partial_reduce_claims(rows, lambda row: f"{what}, {row['workers']} workers")
    return Bench("scalability", command, tuple(rows), tuple(claims))


def write_plot(bench: Bench, path: Path) -> None:
    """Steps a second over workers, a line for each sync, and the ideal."""
    import matplotlib  # loaded only where a picture is asked for

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    counts = sorted({int(row["workers"] or 0) for row in bench.rows})
    for sync in dict.fromkeys(row["sync"] for row in bench.rows):
        points = [(row["workers"], row["steps_per_s"]) for row in bench.rows if row["sync"] == sync]
        axis.plot(*zip(*sorted(points)), marker="o", label=str(sync))
    axis.plot(counts, [count / 0.1 for count in counts], "k--", label="ideal")
    axis.set(xlabel="workers", ylabel="steps a second, all workers")
    axis.legend(fontsize=7)
    figure.tight_layout()
    write_picture(path, figure, dpi=120)
    plt.close(figure)
