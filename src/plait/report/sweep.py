"""The report of a sweep in its folder: trials.csv, the page sweep.html and, with matplotlib, curves.png."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.files import write_atomic
from plait.core.names import has_extra
from plait.report.outputs.tables import columns_of, table_text
from plait.schema.results import SweepResult, TrialResult


def write_sweep(folder: Path, result: SweepResult) -> None:
    """Write the table, the page and the curves of the sweep in `folder`; `result` is its final result."""
    # What makes a page takes a while to import.
    from plait.report.outputs import page, picture
    from plait.report.record import read_run
    from plait.report.run_data import make_data

    write_atomic(folder / "trials.csv", as_csv(result.trials))
    data = make_data(folder.name, read_run(folder), None, result.reason)
    place = {row.trial: number for number, row in enumerate(result.trials)}
    ordered = sorted(data.trials, key=lambda trial: place.get(trial.number, len(place)))
    data = replace(data, trials=tuple(ordered))
    write_atomic(folder / "sweep.html", page.make_page(data))
    if has_extra("matplotlib"):
        picture.draw_report(data, folder / "curves.png")


def flat(row: TrialResult) -> dict[str, Any]:
    """One trial as one flat record."""
    return {
        "trial": row.trial,
        "state": row.state,
        "step": row.step,
        **row.values,
        **{f"test {name}": value for name, value in row.metrics.items()},
        "train_loss": row.train_loss,
        **({"why": row.why} if row.why else {}),
    }


def as_csv(rows: Sequence[TrialResult]) -> str:
    """The trials, best first, as CSV."""
    records = [flat(row) for row in rows]
    return table_text(columns_of(records), records)
