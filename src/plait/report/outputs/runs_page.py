"""A folder of runs as one HTML file: a list of them, and those that a person chooses, compared."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources

from plait.core.units import count_of
from plait.report.comparison import ComparedRun
from plait.report.outputs.markup import document, table


def make_runs_page(title: str, runs: Sequence[ComparedRun], left_out: int = 0) -> str:
    """The page of the runs, in this order; `left_out` is the number of further ones."""
    readable = [run for run in runs if not run.problem]
    script = resources.files("plait.report.outputs").joinpath("compare.js").read_text()
    return document(
        title,
        {
            "head": f"<h1>{html.escape(title)} <span class=state>{count_of(len(runs), 'run')}</span></h1>",
            "runs": _list(readable, left_out),
            "compared": '<h2>Compared</h2><div id="compared"></div>' if readable else "",
            "unreadable": _unreadable([run for run in runs if run.problem]),
            "data": f'<script type="application/json" id="runs-data">{_data(readable)}</script>',
        },
        script=script,
    )


def _list(runs: Sequence[ComparedRun], left_out: int) -> str:
    if not runs:
        return ""
    results = list(dict.fromkeys(name for run in runs for name in run.result))
    head = ["run", "state", "steps", *results, "time", "workers"]
    rows = [
        [
            run.name,
            run.state,
            run.steps,
            *(run.result.get(name, "-") for name in results),
            run.time,
            run.workers,
        ]
        for run in runs
    ]
    more = f" {count_of(left_out, 'older run')} left out." if left_out else ""
    note = (
        "Newest first; click a column to sort by it, and choose the runs to compare. Losses and metrics are "
        f"the last ones, of a sweep those of its best trial.{more} plait report RUN writes one run's page."
    )
    return f'<p class=note>{note}</p><div class="sortable" id="runs">{table(head, rows, words=(0,))}</div>'


def _unreadable(runs: Sequence[ComparedRun]) -> str:
    if not runs:
        return ""
    rows = [[run.name, run.state, run.problem] for run in runs]
    return "<h2>Nothing to show of</h2>" + table(["run", "state", "why"], rows, words=(0, 1, 2))


def _data(runs: Sequence[ComparedRun]) -> str:
    values = [
        {
            "name": run.name,
            "settings": run.settings,
            "curves": {
                name: [[step, float(f"{value:.6g}")] for step, value in points]
                for name, points in run.curves.items()
            },
        }
        for run in runs
    ]
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
