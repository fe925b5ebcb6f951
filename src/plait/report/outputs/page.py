"""The report of a run as one HTML file that needs nothing else: style, script and data are within it."""

from __future__ import annotations

import html
from collections.abc import Sequence

from plait.core.units import show_bytes, show_rate, show_seconds
from plait.launcher.run_dir import GOING_ON
from plait.report.occurrences import Occurrence
from plait.report.outputs.charts import chart, parallel_coordinates, trial_charts
from plait.report.outputs.markup import document, head_of, or_dash, table
from plait.report.outputs.timeline_section import timeline_section
from plait.report.run_data import RunData
from plait.schema.results import show_metric, show_value

MOST_TRIALS = 500


def make_page(data: RunData) -> str:
    """The page of a run."""
    note = ""
    if data.state in GOING_ON:
        note = "The run is going on; this is how far it was when the page was made."
    head = head_of(data.name, data.state, data.cause, note)
    return document(data.name, {"head": head, **sections_of(data)})


def sections_of(data: RunData) -> dict[str, str]:
    """The sections of the page below its head, by name and in order; empty where the run has nothing."""
    return {
        "summary": _summary(data),
        "trials": _trials(data),
        "timeline": timeline_section(data),
        "stages": _stages(data),
        "replicas": _replicas(data),
        "changes": _occurrences("Adaptations", data.changes, data.origin),
        "faults": _occurrences("Faults", data.faults, data.origin),
    }


def _summary(data: RunData) -> str:
    facts = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(text)}</dd>" for key, text in data.facts)
    charts = "".join(chart(name, {name: points}) for name, points in data.curves.items())
    if data.work:
        charts += chart("seconds of work in a step", data.work)
    return f'<dl>{facts}</dl><div class="charts">{charts}</div>'


def _stages(data: RunData) -> str:
    if not data.stages:
        return ""
    head = ["stage", "workers", "layers", "forward", "backward", "update", "sends", "memory"]
    rows = []
    for row in data.stages:
        times = [
            f"{or_dash(planned, show_seconds)} / {or_dash(measured, show_seconds)}"
            for planned, measured in zip(row.planned_s, row.measured_s)
        ]
        sent = f"{or_dash(row.output_bytes, show_bytes)} / {or_dash(row.sent_bytes, show_bytes)}"
        memory = f"{or_dash(row.memory_bytes, show_bytes)} / {or_dash(row.measured_memory_bytes, show_bytes)}"
        workers = ", ".join(map(str, row.workers))
        rows.append([str(row.stage), workers, or_dash(row.layers, str), *times, sent, memory])
    note = (
        "Predicted / measured: seconds of one microbatch and of one update, bytes of a microbatch's output "
        "that go to other workers (medians, with what describes the tensors), and memory. The measured "
        "memory is that of a GPU or of a whole process, with Python and PyTorch; the prediction is of "
        "tensors alone. Only the worker that keeps the record has it."
    )
    plan = ""
    if data.plan is not None:
        text = f"{len(data.plan.stages)} stages, schedule {data.plan.schedule.value}. {data.plan.why}"
        plan = f"<p>{html.escape(text)}</p>"
    return f"<h2>Stages</h2>{plan}{table(head, rows)}<p class=note>{note}</p>"


def _replicas(data: RunData) -> str:
    if not data.replicas:
        return ""
    head = ["worker", "updates", "samples/s", "waited", "group size", "sent", "last distance to the mean"]
    rows = [
        [
            str(row.worker),
            f"{row.updates:,}",
            show_rate(row.samples_per_s),
            f"{row.wait_share:.0%}",
            or_dash(row.group_size, lambda size: f"{size:.2f}"),
            show_bytes(row.bytes_sent),
            or_dash(row.distance, lambda distance: f"{distance:.3g}"),
        ]
        for row in data.replicas
    ]
    curve = chart("distance of the weights to the mean", data.distances)
    return f'<h2>Replicas</h2>{table(head, rows)}<div class="charts">{curve}</div>'


def _occurrences(title: str, each: Sequence[Occurrence], origin: float) -> str:
    if not each:
        return f"<h2>{title}</h2><p>none</p>"
    rows = [[show_seconds(max(0.0, o.t - origin)), or_dash(o.step, str), o.what, o.why] for o in each]
    return f"<h2>{title}</h2>" + table(["after", "step", "what", "why"], rows, words=(2, 3))


def _trials(data: RunData) -> str:
    if not data.trials:
        return ""
    keys = list(dict.fromkeys(key for trial in data.trials for key in trial.values))
    metrics = list(dict.fromkeys(name for trial in data.trials for name in trial.metrics))
    head = ["trial", *keys, *(f"test {name}" for name in metrics), "steps", "state"]
    rows = [
        [
            str(trial.number),
            *(show_value(trial.values.get(key, "-")) for key in keys),
            *(show_metric(name, trial.metrics[name]) if name in trial.metrics else "-" for name in metrics),
            str(trial.step),
            trial.state,
        ]
        for trial in data.trials[:MOST_TRIALS]
    ]
    left = len(data.trials) - len(rows)
    more = (
        f"<p>and {left} more; plait report {html.escape(data.name)} --csv FOLDER has all</p>" if left else ""
    )
    return (
        f"<h2>Trials</h2><p>Best first, by {html.escape(data.metric)}, or by training loss before there is a "
        f"result; click a column to sort by it.</p>"
        f"{trial_charts(data.trials)}{parallel_coordinates(data.trials)}"
        f'<div class="sortable">{table(head, rows)}</div>{more}'
    )
