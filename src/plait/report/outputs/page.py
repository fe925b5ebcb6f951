"""The report of a run as one HTML file that needs nothing else: style, script and data are within it."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from plait.core.units import show_bytes, show_seconds
from plait.report.idle import CAUSES, RECEIVING
from plait.report.occurrences import Occurrence
from plait.report.outputs.charts import chart, parallel_coordinates, trial_charts
from plait.report.run_data import GOING_ON, RunData
from plait.report.timeline import LABELS, Timeline
from plait.schema.results import show_metric, show_value

# The first bytes of a page, by which it is known as a report.
MARK = "<!doctype html>\n<!-- plait report -->\n"
MOST_PREDICTED = 5000
MOST_TRIALS = 500


def make_page(data: RunData) -> str:
    """The page of a run."""
    note = ""
    if data.state in GOING_ON:
        note = "The run is going on; this is how far it was when the page was made."
    return document(
        data.name, {"head": head_of(data.name, data.state, data.cause, note), **sections_of(data)}
    )


def document(title: str, sections: Mapping[str, str], style: str = "", script: str = "") -> str:
    """One file of the sections, with the page's style and script and more of both."""
    of_page = [resources.files("plait.report.outputs").joinpath(name).read_text() for name in _FILES]
    parts = "".join(f'<section id="part-{name}">{text}</section>' for name, text in sections.items())
    return (
        f'{MARK}<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{of_page[0]}{style}'
        f"</style></head>\n<body>{parts}<script>{of_page[1]}{script}</script></body></html>\n"
    )


def sections_of(data: RunData) -> dict[str, str]:
    """The sections of the page below its head, by name."""
    return {
        "summary": _summary(data),
        "timeline": _timeline(data),
        "stages": _stages(data),
        "replicas": _replicas(data),
        "changes": _occurrences("Adaptations", data.changes, data.origin),
        "faults": _occurrences("Faults", data.faults, data.origin),
        "trials": _trials(data),
    }


_FILES = ("page.css", "page.js")


def head_of(name: str, state: str, cause: str | None, *notes: str) -> str:
    """The title, the state and why it failed, and `notes` about it."""
    bad = " bad" if state in ("failed", "died", "diverged") else ""
    pill = f'<span class="state{bad}">{html.escape(state)}</span>'
    why = f'<p class="bad">It ended with: {html.escape(cause)}</p>' if cause else ""
    lines = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes if note)
    return f"<h1>{html.escape(name)} {pill}</h1>{why}{lines}"


def _summary(data: RunData) -> str:
    facts = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(text)}</dd>" for key, text in data.facts)
    charts = "".join(chart(name, {name: points}) for name, points in data.curves.items())
    if data.work:
        charts += chart("seconds of work in a step", data.work)
    return f'<dl>{facts}</dl><div class="charts">{charts}</div>'


def _timeline(data: RunData) -> str:
    line = data.timeline
    if line is None:
        return ""
    has_ops = bool(line.idle_s.size)
    buttons = "".join(
        f'<button name="{name}" title="{title}">{text}</button> '
        for name, text, title in (
            ("all", "all", "the whole run"),
            ("first", "first step", "the first step"),
            ("further", "−", "zoom out"),
            ("closer", "+", "zoom in"),
            ("left", "◀", "earlier"),
            ("right", "▶", "later"),
        )
    )
    content = json.dumps(_timeline_data(data, line), separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<h2>Timeline</h2><div id="timeline"><p>{buttons}</p><canvas data-keep tabindex="0" role="img" '
        f'aria-label="operations of the workers over time"></canvas><p class="tip" data-keep>&nbsp;</p></div>'
        f"{_key(has_ops)}<p class=note>{_explanation(data, line)}</p>{_idle_table(line)}"
        f'<script type="application/json" id="timeline-data">{content}</script>'
        f"<noscript><p>The timeline needs JavaScript; the rest of the page does not.</p></noscript>"
    )


def _key(has_ops: bool) -> str:
    computing = '<span class="key" style="color:var(--steps)">computing</span>'
    if has_ops:
        computing = (
            '<span class="key">microbatches by colour: forward light, backward dark</span>'
            '<span class="key" style="color:var(--update)">update</span>'
            '<span class="key receive">receiving (low bars)</span>'
        )
    other = '<span class="key" style="color:var(--other)">evaluation, checkpoint</span>'
    return f'<p class=legend>{computing}{other}<span class="key idle">idle (background)</span></p>'


def _explanation(data: RunData, line: Timeline) -> str:
    parts = ["Drag to move, pinch or Ctrl and the wheel to zoom, arrow keys and + and - after a click."]
    if not line.idle_s.size:
        parts.append(
            "This run recorded whole steps, not single operations: only pipelines (parallel.plan) record "
            "each forward, backward and update. monitor: [noise-scale] in the job records the seconds of "
            "each worker."
        )
        return " ".join(parts)
    parts.append(
        "An operation begins when its input has arrived. Sending runs in the background; receiving is the "
        "time from the end of the operation that sent an input to the start of the one that needs it, as far "
        "as the worker was idle then."
    )
    if len(line.predicted):
        parts.append("The thin lane beneath each worker is the planner's prediction from the same start.")
    if len(line.windows) > 1:
        parts.append(
            f"Of {line.total:,} operations {len(line.ops):,} are here one by one, in {len(line.windows)} "
            f"intervals spread over the run; elsewhere the height of a colour is its share of the time. "
            f"plait report {html.escape(data.name)} --trace FILE has all of them."
        )
    return " ".join(parts)


def _timeline_data(data: RunData, line: Timeline) -> dict[str, Any]:
    ops, predicted = line.ops, line.predicted
    rows = np.array(line.workers)
    of_plan = np.isin(predicted.workers, rows).nonzero()[0][:MOST_PREDICTED]
    shown = predicted.take(of_plan)
    stages = {worker: [row.stage for row in data.stages if worker in row.workers] for worker in line.workers}
    return {
        "end": max(line.end_s, 1e-6),
        "names": [_worker_name(worker, stages[worker]) for worker in line.workers],
        "row": _packed(np.searchsorted(rows, ops.workers), np.uint16),
        "kind": _packed(ops.letters, np.uint8),
        "stage": _packed(ops.stages, np.uint16),
        "microbatch": _packed(ops.microbatches, np.uint32),
        "start": _packed(ops.starts, np.float64),
        "seconds": _packed(ops.ends - ops.starts, np.float32),
        "received": _packed(line.received_s, np.float32),
        "cause": _packed(line.causes, np.uint8),
        "windows": [[start, min(end, line.end_s + 1.0)] for start, end in line.windows],
        "buckets": line.overview.shape[2],
        "overview": _packed(np.rint(line.overview * 255), np.uint8),
        "groups": ["forward", "backward", "update", "evaluation or checkpoint", "computing"],
        "labels": LABELS,
        "causes": CAUSES,
        "receiving": RECEIVING,
        "anchors": _packed(line.anchors, np.float64),
        "predicted": {
            "row": np.searchsorted(rows, shown.workers).tolist(),
            "kind": [chr(letter) for letter in shown.letters],
            "microbatch": shown.microbatches.tolist(),
            "start": shown.starts.tolist(),
            "end": shown.ends.tolist(),
        },
    }


def _worker_name(worker: int, stages: Sequence[int]) -> str:
    of = f" (stage {', '.join(map(str, stages))})" if stages else ""
    return f"worker {worker}{of}"


def _packed(values: Any, kind: Any) -> str:
    """An array as little-endian bytes in base 64, as browsers read typed arrays."""
    return base64.b64encode(np.asarray(values).astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def _idle_table(line: Timeline) -> str:
    if not line.idle_s.size:
        return ""
    rows = [
        [f"worker {worker}", show_seconds(float(busy)), *(show_seconds(float(each)) for each in idle)]
        for worker, busy, idle in zip(line.workers, line.busy_s, line.idle_s)
    ]
    return "<h3>Where the time went</h3>" + table(["", "computing", *CAUSES], rows, words=1)


def _stages(data: RunData) -> str:
    if not data.stages:
        return ""
    names = ("forward", "backward", "update")
    head = ["stage", "workers", "layers"]
    for name in names:
        head += [f"{name}, predicted", "measured"]
    head += ["sent a microbatch, predicted", "memory, predicted", "most memory of a worker, measured"]
    rows = []
    for row in data.stages:
        times = [_or_dash(each, show_seconds) for pair in zip(row.planned_s, row.measured_s) for each in pair]
        sizes = (row.output_bytes, row.memory_bytes, row.measured_memory_bytes)
        workers = ", ".join(map(str, row.workers))
        layers = _or_dash(row.layers, str)
        rows.append(
            [str(row.stage), workers, layers, *times, *(_or_dash(each, show_bytes) for each in sizes)]
        )
    note = (
        "Seconds of one microbatch (medians) and of one update. Bytes that were sent are not recorded. The "
        "measured memory is that of a GPU or of a whole process, with Python and PyTorch; the prediction is "
        "of tensors alone. Only the worker that keeps the record has it."
    )
    plan = ""
    if data.plan is not None:
        text = f"{len(data.plan.stages)} stages, schedule {data.plan.schedule.value}, {data.plan.why}"
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
            f"{row.samples_per_s:,.0f}",
            f"{row.wait_share:.0%}",
            _or_dash(row.group_size, lambda size: f"{size:.2f}"),
            show_bytes(row.bytes_sent),
            _or_dash(row.distance, lambda distance: f"{distance:.3g}"),
        ]
        for row in data.replicas
    ]
    curve = chart("distance of the weights to the mean", data.distances)
    return f'<h2>Replicas</h2>{table(head, rows)}<div class="charts">{curve}</div>'


def _occurrences(title: str, each: Sequence[Occurrence], origin: float) -> str:
    if not each:
        return f"<h2>{title}</h2><p>none</p>"
    rows = [[_after(o.t - origin), _or_dash(o.step, str), o.what, o.why] for o in each]
    return f"<h2>{title}</h2>" + table(["after", "step", "what", "why"], rows, words=(2, 3))


def _after(seconds: float) -> str:
    return show_seconds(max(0.0, seconds))


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
    charts = "".join(trial_charts(data.trials))
    return (
        f"<h2>Trials</h2><p>Best first, by {html.escape(data.metric)}.</p>"
        f'<div class="charts">{charts}</div>{parallel_coordinates(data.trials)}{table(head, rows)}{more}'
    )


def _or_dash(value: Any, show: Any) -> str:
    return "-" if value is None or (isinstance(value, float) and math.isnan(value)) else show(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int | tuple[int, ...] = ()) -> str:
    """A table that scrolls sideways on a narrow screen; columns of `words` are aligned left."""
    columns = words if isinstance(words, tuple) else tuple(range(words))

    def cells(tag: str, texts: Sequence[str]) -> str:
        marks = [' class="words"' if number in columns else "" for number in range(len(texts))]
        return "".join(f"<{tag}{mark}>{html.escape(text)}</{tag}>" for mark, text in zip(marks, texts))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", head)}</tr>{body}</table></div>'
