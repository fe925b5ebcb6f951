"""The timeline of a page: what `timeline.js` draws, what the colours mean, and where the time went."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.core.units import show_seconds
from plait.report.idle import BETWEEN, CAUSES, RECEIVING
from plait.report.outputs.markup import table
from plait.report.run_data import RunData
from plait.report.timeline import LABELS, Timeline

MOST_PREDICTED = 5000
MOST_MARKS = 1000
_BUTTONS = (
    ("all", "all", "the whole run"),
    ("first", "first step", "the first step"),
    ("further", "−", "zoom out"),
    ("closer", "+", "zoom in"),
    ("left", "◀", "earlier"),
    ("right", "▶", "later"),
)


def timeline_section(data: RunData) -> str:
    """The timeline of a run and what explains it; nothing if nothing in its record has a time."""
    line = data.timeline
    if line is None:
        return ""
    buttons = "".join(
        f'<button name="{name}" title="{title}">{text}</button> ' for name, text, title in _BUTTONS
    )
    content = json.dumps(timeline_data(data, line), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<h2>Timeline</h2><div id="timeline"><p>{buttons}</p><canvas data-keep tabindex="0" role="img" '
        f'aria-label="operations of the workers over time"></canvas><p class="tip" data-keep>&nbsp;</p></div>'
        f"{_key(data, line)}<p class=note>{_explanation(data, line)}</p>{_idle_table(line)}"
        f'<script type="application/json" id="timeline-data">{content}</script>'
        f"<noscript><p>The timeline needs JavaScript; the rest of the page does not.</p></noscript>"
    )


def _key(data: RunData, line: Timeline) -> str:
    computing = [("steps", "computing")]
    if line.idle_s.size:
        computing = [
            ("forward", "forward"),
            ("backward", "backward"),
            ("update", "update"),
            *([("message", "sent, received (thin bars beneath)")] if len(line.messages) else []),
            ("wait", "idle: waiting"),
            ("receive", "idle: receiving (low bars)"),
        ]
    has_waits = bool(line.idle_s.size) or (line.causes > BETWEEN).any()
    idle = "idle: between steps" if has_waits else "idle"
    others = [("other", "evaluation, checkpoint, audit"), ("idle", idle)]
    if has_waits and not line.idle_s.size:
        others.insert(0, ("wait", "idle: waiting for others"))
    keys = "".join(f'<span class="key {name}">{text}</span>' for name, text in computing + others)
    marks = '<span class="mark">▼ adaptation, fault</span>' if data.changes or data.faults else ""
    return f"<p class=legend>{keys}{marks}</p>"


def _explanation(data: RunData, line: Timeline) -> str:
    parts = [
        "Drag to move, pinch or Ctrl and the wheel to zoom, arrow keys and + and - after a click. "
        "From afar, the height of a colour is its share of the time;"
    ]
    if not line.idle_s.size:
        parts.append(
            "nearer, each bar is an interval of steps. Only pipelines (parallel.plan) record each forward, "
            "backward and update."
        )
        if not (line.causes > BETWEEN).any():
            parts.append("With monitor: [noise-scale] in the job, a bar shows how long each worker waited.")
        return " ".join(parts)
    parts.append(
        "nearer, each operation is a bar, with a "
        "colour for each microbatch, forward light and backward dark. "
        "An operation begins when its input has arrived. Receiving, as idle time, is the "
        "time from the end of the operation that sent an input to the start of the one that needs it, as far "
        "as the worker was idle then."
    )
    if len(line.messages):
        parts.append(
            "The two thin rows beneath a worker are its messages: above, those it sent, from when an "
            "operation handed them over to when they had left; below, those it received, from when an "
            "operation asked for them, so with the time that it waited."
        )
    if len(line.predicted):
        parts.append("The thin lane beneath each worker is the planner's prediction from the same start.")
    if len(line.windows) > 1:
        parts.append(
            f"Of {line.total:,} operations {len(line.ops):,} are here one by one, in {len(line.windows)} "
            f"intervals spread over the run, which the axis underlines. "
            f"plait report {html.escape(data.name)} --trace FILE has all."
        )
    return " ".join(parts)


def timeline_data(data: RunData, line: Timeline) -> dict[str, Any]:
    """What `timeline.js` reads: long lists as typed arrays."""
    ops, messages, predicted = line.ops, line.messages, line.predicted
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
        "messages": {
            "row": _packed(np.searchsorted(rows, messages.workers), np.uint16),
            "way": _packed(messages.ways, np.uint8),
            "kind": _packed(messages.letters, np.uint8),
            "microbatch": _packed(messages.microbatches, np.uint32),
            "peer": _packed(messages.peers, np.uint16),
            "stage": _packed(messages.peer_stages, np.uint16),
            "bytes": _packed(messages.bytes, np.float32),
            "start": _packed(messages.starts, np.float64),
            "seconds": _packed(messages.ends - messages.starts, np.float32),
        },
        "windows": [[start, min(end, line.end_s + 1.0)] for start, end in line.windows],
        "buckets": line.overview.shape[2],
        "overview": _packed(np.rint(line.overview * 255), np.uint8),
        "groups": ["forward", "backward", "update", "evaluation, saving, audit", "computing", "waiting"],
        "labels": LABELS,
        "causes": CAUSES,
        "receiving": RECEIVING,
        "between": BETWEEN,
        "marks": _marks(data, line),
        "anchors": _packed(line.anchors, np.float64),
        "predicted": {
            "row": np.searchsorted(rows, shown.workers).tolist(),
            "kind": [chr(letter) for letter in shown.letters],
            "microbatch": shown.microbatches.tolist(),
            "start": shown.starts.tolist(),
            "end": shown.ends.tolist(),
        },
    }


def _marks(data: RunData, line: Timeline) -> list[tuple[float, str, bool]]:
    """When something happened to the run, what, and whether it is a fault."""
    happened = [(each, False) for each in data.changes] + [(each, True) for each in data.faults]
    return [
        (min(max(0.0, each.t - line.origin), line.end_s), f"{each.what}: {each.why}", is_fault)
        for each, is_fault in happened[:MOST_MARKS]
    ]


def _worker_name(worker: int, stages: Sequence[int]) -> str:
    of = f" (stage {', '.join(map(str, stages))})" if stages else ""
    return f"worker {worker}{of}"


def _packed(values: Any, kind: Any) -> str:
    """An array as little-endian bytes in base 64, as browsers read typed arrays."""
    return base64.b64encode(np.asarray(values).astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def _idle_table(line: Timeline) -> str:
    """Seconds of each worker, without reasons for which there are none."""
    if not line.idle_s.size:
        return ""
    used = [number for number in range(len(CAUSES)) if line.idle_s[:, number].any()]
    rows = [["computing", *(show_seconds(float(busy)) for busy in line.busy_s)]]
    if line.other_s.any():
        rows.append(["evaluating, saving, auditing", *(show_seconds(float(s)) for s in line.other_s)])
    rows += [[CAUSES[each], *(show_seconds(float(s)) for s in line.idle_s[:, each])] for each in used]
    head = ["", *(f"worker {worker}" for worker in line.workers)]
    return "<h3>Where the time went</h3>" + table(head, rows, words=(0,))
