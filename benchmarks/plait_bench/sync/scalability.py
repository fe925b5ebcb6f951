"""Throughput of each sync over the number of workers, all of one speed: who still scales at eight."""

from __future__ import annotations

from pathlib import Path

from plait_bench.harness import Bench, picture
from plait_bench.sync.speed import STEP_S, partial_reduce_claims, speed_rows

WORKERS = (2, 4, 8)
SYNCS = (
    "all-reduce",
    "all-reduce, star",
    "partial-reduce",
    "ad-psgd",
    "pair-averaging",
    "local-sgd H=8",
    "hetpipe D=4",
)


def run(command: str = "plait bench scalability") -> Bench:
    """Measure every sync with each number of workers."""
    rows = [row for count in WORKERS for row in speed_rows(["homogeneous"], SYNCS, count)]
    what = "partial reduce's fraction of ideal throughput"
    claims = partial_reduce_claims(rows, lambda row: f"{what}, {row['workers']} workers")
    return Bench("scalability", command, rows, claims)


def write_plot(bench: Bench, path: Path) -> None:
    """Steps a second over workers, a line for each sync, and the ideal."""
    with picture(path, (6, 4)) as (axis,):
        for sync in dict.fromkeys(row["sync"] for row in bench.rows):
            points = [(row["workers"], row["steps_per_s"]) for row in bench.rows if row["sync"] == sync]
            axis.plot(*zip(*sorted(points)), marker="o", label=str(sync))
        axis.plot(WORKERS, [count / STEP_S for count in WORKERS], "k--", label="ideal")
        axis.set(xlabel="workers", ylabel="steps a second, all workers")
        axis.legend(fontsize=7)
