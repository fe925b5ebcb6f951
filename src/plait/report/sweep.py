"""The report of a sweep: trials.csv, a self-contained sweep.html and, with matplotlib, curves.png."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.core import events as core_events
from plait.core.files import write_atomic
from plait.core.names import has_extra, how_to_install
from plait.core.units import count_of, show_rate
from plait.report.outputs.tables import columns_of, table_text
from plait.report.trials import TrialRow, trials_of
from plait.schema.results import SweepResult, TrialResult, show_value

# The number of coloured curves; the rest is grey.
COLOURED = 8


def write_sweep(folder: Path, result: SweepResult) -> None:
    """Write the table and the curves of the sweep in `folder`; `result` is its final result."""
    recorded = trials_of([*core_events.read(folder / "events" / "rank0.jsonl")])
    write_atomic(folder / "trials.csv", as_csv(result.trials))
    shown = f"(learning curves are drawn after {how_to_install('matplotlib')})"
    if has_extra("matplotlib"):
        picture = draw(result.trials, {row.number: row for row in recorded})
        write_atomic(folder / "curves.png", picture)
        encoded = base64.b64encode(picture).decode()
        shown = f'<img alt="learning curves" src="data:image/png;base64,{encoded}">'
    write_atomic(folder / "sweep.html", page(folder.name, result, shown))


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


def draw(rows: Sequence[TrialResult], curves: Mapping[int, TrialRow]) -> bytes:
    """The learning curves as a PNG: the training loss and each metric, the best trials in colour."""
    import matplotlib  # slow to import, so only if needed

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    metrics = list(dict.fromkeys(name for curve in curves.values() for name in curve.tests))
    size = (4.6 * (1 + len(metrics)) + 2.5, 3.6)
    figure, axes = plt.subplots(1, 1 + len(metrics), figsize=size, squeeze=False, layout="constrained")
    # The best last, so that they are drawn above the others.
    for rank, row in reversed(list(enumerate(rows))):
        curve = curves.get(row.trial, TrialRow(row.trial))
        look = _look(rank, row)
        _plot(axes[0][0], curve.losses, look)
        for axis, name in zip(axes[0][1:], metrics):
            _plot(axis, curve.tests.get(name, {}), look)
    for axis, name in zip(axes[0], ["training loss", *(f"test {name}" for name in metrics)]):
        axis.set(title=name, xlabel="step")
        if "loss" in name and any(line.get_ydata().size for line in axis.lines):
            axis.set_yscale("log")
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles[::-1], labels[::-1], fontsize=7, loc="outside right upper")
    target = io.BytesIO()
    figure.savefig(target, dpi=110, format="png")
    plt.close(figure)
    return target.getvalue()


def _look(rank: int, row: TrialResult) -> dict[str, Any]:
    if rank >= COLOURED:
        return {"color": "0.8", "linewidth": 0.7}
    label = ", ".join(f"{key.rpartition('.')[2]} {show_value(value)}" for key, value in row.values.items())
    return {"color": f"C{rank}", "linewidth": 1.3, "label": f"{row.trial}: {label}"[:60]}


def _plot(axis: Any, points: Mapping[int, float | None], look: Mapping[str, Any]) -> None:
    known = sorted((step, value) for step, value in points.items() if value is not None)
    if known:
        marker = "." if len(known) < 3 else None
        axis.plot(*zip(*known), marker=marker, **look)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; color: #222; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2em .8em; text-align: right; }}
th {{ cursor: pointer; border-bottom: 1px solid #888; }} tr:nth-child(even) td {{ background: #f4f4f4; }}
img {{ max-width: 100%; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
{curves}
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
<script>
document.querySelectorAll("th").forEach((head, column) => head.onclick = () => {{
  const body = document.querySelector("tbody"), rows = [...body.rows];
  const value = row => {{
    const text = row.cells[column].textContent, number = parseFloat(text);
    return isNaN(number) ? text : number;
  }};
  const sign = head.dataset.down ? -1 : 1;
  head.dataset.down = head.dataset.down ? "" : "1";
  rows.sort((a, b) => (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0) * sign);
  body.append(...rows);
}});
</script>
</html>
"""


def page(title: str, result: SweepResult, curves: str) -> str:
    """The sweep as one HTML file: curves and a table that can be sorted by clicking on a column."""
    records = [flat(row) for row in result.trials]
    columns = columns_of(records)
    cells = [[show_value(record.get(column, "")) for column in columns] for record in records]
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in cells
    )
    summary = (
        f"{result.step} of {result.steps} trials ({result.search}), compared by {result.metric}; "
        f"{result.seconds:.1f} s, {show_rate(result.trial_steps_per_s)} trial steps/s on "
        f"{count_of(result.workers, 'worker')}. Best first; click a column to sort by it."
    )
    return _PAGE.format(
        title=html.escape(title),
        summary=html.escape(summary),
        curves=curves,
        head="".join(f"<th>{html.escape(column)}</th>" for column in columns),
        body=body,
    )
