"""The curves and the beginning of the timeline of a run as one PNG; needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from plait.core.files import write_picture
from plait.report.curves import Points, decimated, points_of
from plait.report.outputs.charts import COLOURS, highest_shown, trial_label
from plait.report.run_data import RunData
from plait.report.timeline import LABELS, Timeline

# In the first bytes of a picture, by which it is known as a report.
MARK = "plait report"
COLUMNS = 3
MOST_BARS = 2000
_COLOURS = {
    "F": "#4c8bf5", "B": "#2f9561", "I": "#2f9561", "W": "#a8d5b5", "U": "#d9962b",
    "S": "#4c8bf5", "P": "#4c8bf5", "C": "#c0c4d0", "A": "#5c6170"}  # fmt: skip


def draw_report(data: RunData, path: Path) -> None:
    """Draw the run to the PNG file `path`."""
    # Matplotlib takes a second to import.
    from matplotlib.figure import Figure

    panels = _panels(data)
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    lines = 0 if data.timeline is None else 1
    size = (13, 2.8 * rows + (1.2 + 0.35 * len(data.timeline.workers) if data.timeline else 0.4))
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    figure.suptitle(f"{data.name}: {data.state}", fontsize=11)
    grid = figure.add_gridspec(rows + lines, COLUMNS)
    for number, (title, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[number // COLUMNS, number % COLUMNS])
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        # The first curves are drawn last, above the others.
        for place, (label, points) in reversed(list(enumerate(curves))):
            look: dict[str, Any] = (
                {"color": f"C{place}", "label": label} if place < COLOURS else {"color": "0.8"}
            )
            axes.plot(*zip(*decimated(points)), linewidth=1, marker="." if len(points) < 3 else None, **look)
        if "loss" in title and min(value for _, points in curves for _, value in points) > 0:
            axes.set_yscale("log")
        top = highest_shown([points for _, points in curves])
        if axes.get_ylim()[1] > top:
            axes.set_ylim(0.8 * min(value for _, points in curves for _, value in points), top)
        if number == 0 and len(curves) > 1:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles[::-1], labels[::-1], fontsize=7, loc="outside right upper")
    if data.timeline is not None:
        _draw_bars(figure.add_subplot(grid[rows, :]), data.timeline)
    write_picture(path, figure, metadata={"Software": MARK})


def _panels(data: RunData) -> dict[str, list[tuple[str, Points]]]:
    """Curves with their labels, by title; those of all trials of a sweep together."""
    panels = {name: [(name, points)] for name, points in data.curves.items()}
    for trial in data.trials:
        of_trial = {"training loss": trial.losses, **{f"test {n}": test for n, test in trial.tests.items()}}
        for name, values in of_trial.items():
            if points := points_of(values):
                panels.setdefault(name, []).append((trial_label(trial), points))
    return panels


def _draw_bars(axes: Any, line: Timeline) -> None:
    ops = line.ops.take(slice(0, MOST_BARS))
    row = {worker: number for number, worker in enumerate(line.workers)}
    for letter in dict.fromkeys(map(chr, ops.letters.tolist())):
        chosen = ops.take(ops.letters == ord(letter))
        axes.barh(
            [row[worker] for worker in chosen.workers.tolist()],
            chosen.ends - chosen.starts,
            left=chosen.starts,
            height=0.8,
            color=_COLOURS.get(letter, "#8a8fa0"),
            label=LABELS.get(letter, letter),
        )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    axes.set_yticks(range(len(row)), [f"worker {worker}" for worker in row])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (the beginning of the run)", fontsize=8)
