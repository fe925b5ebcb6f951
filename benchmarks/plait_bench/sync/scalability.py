"""Throughput of each sync over the number of workers, all of one speed: who still scales at eight."""

from __future__ import annotations

from pathlib import Path

from plait_bench.harness import Bench, number
from plait_bench.pictures import curve, picture
from plait_bench.sync.speed import (
    QUICK_COURSE,
    QUICK_SYNCS,
    REPEATS,
    SECONDS,
    STEP_S,
    partial_reduce_claims,
    speed_rows,
)

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


def run(quick: bool = False, command: str = "plait bench scalability") -> Bench:
    """Measure every sync with each number of workers; `quick` takes fewer of both, for a shorter time."""
    counts, syncs = (WORKERS[:2], QUICK_SYNCS) if quick else (WORKERS, SYNCS)
    course = QUICK_COURSE if quick else (SECONDS, REPEATS)
    rows = [row for count in counts for row in speed_rows(["homogeneous"], syncs, count, *course)]
    what = "partial reduce's fraction of ideal throughput"
    claims = partial_reduce_claims(rows, lambda row: f"{what}, {row['workers']} workers")
    return Bench("scalability", command, rows, claims)


def write_plot(bench: Bench, path: Path) -> None:
    """Steps a second over workers, a line for each sync, and the ideal."""
    with picture(bench, path, (6, 4)) as (axis,):
        for sync in dict.fromkeys(row["sync"] for row in bench.rows):
            own = [row for row in bench.rows if row["sync"] == sync]
            curve(axis, own, "workers", "steps_per_s", str(sync))
        counts = sorted({number(row, "workers") for row in bench.rows})
        axis.plot(counts, [count / STEP_S for count in counts], "k--", label="ideal")
        axis.set_xticks(counts)
        axis.set(xlabel="workers", ylabel="steps a second, all workers")
        axis.legend(fontsize=7)
