"""Tables of a report as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.report.arrays import OpArrays
from plait.report.idle import CAUSES
from plait.report.occurrences import Occurrence
from plait.report.record import RunRecorded
from plait.report.run_data import RunData

_OPERATION = ("worker", "kind", "stage", "microbatch", "start", "end")
_MESSAGE = (*_OPERATION, "way", "peer", "peer_stage", "bytes")
_OCCURRENCE = ("t", "step", "what", "why")
_STAGE = (
    "stage",
    "workers",
    "layers",
    *(f"{name}_{how}_s" for name in ("forward", "backward", "update") for how in ("planned", "measured")),
    "output_bytes",
    "sent_bytes",
    "memory_planned_bytes",
    "memory_measured_bytes",
)
_REPLICA = ("worker", "updates", "samples_per_s", "wait_share", "group_size", "bytes_sent", "distance")


def make_tables(data: RunData, recorded: RunRecorded) -> dict[str, str]:
    """The tables of a run by file name, without those that would be empty."""
    points = [
        {"curve": name, "step": step, "value": value}
        for name, curve in data.curves.items()
        for step, value in curve
    ]
    line = data.timeline
    idle = [] if line is None else [
        dict(zip(("worker", "computing", *CAUSES), (worker, float(busy), *map(float, seconds))))
        for worker, busy, seconds in zip(line.workers, line.busy_s, line.idle_s)
    ]  # fmt: skip
    trials = [
        {
            "trial": trial.number,
            "state": trial.state,
            "step": trial.step,
            **trial.values,
            **{f"test {name}": value for name, value in trial.metrics.items()},
            "why": trial.why,
        }
        for trial in data.trials
    ]
    tables: dict[str, tuple[Sequence[str], Sequence[Mapping[str, Any]]]] = {
        "curves.csv": (("curve", "step", "value"), points),
        "idle.csv": (("worker", "computing", *CAUSES), idle),
        "stages.csv": (_STAGE, [_stage(row) for row in data.stages]),
        "replicas.csv": (_REPLICA, [vars(row) for row in data.replicas]),
        "adaptations.csv": (_OCCURRENCE, _happened(data.changes)),
        "faults.csv": (_OCCURRENCE, _happened(data.faults)),
        "trials.csv": (columns_of(trials), trials),
    }
    texts = {name: table_text(columns, rows) for name, (columns, rows) in tables.items() if rows}
    if len(recorded.ops):
        texts["operations.csv"] = _arrays_text(_OPERATION, recorded.ops)
    if len(recorded.messages):
        texts["messages.csv"] = _arrays_text(_MESSAGE, recorded.messages)
    return texts


def _stage(row: Any) -> dict[str, Any]:
    times = [each for pair in zip(row.planned_s, row.measured_s) for each in pair]
    sizes = (row.output_bytes, row.sent_bytes, row.memory_bytes, row.measured_memory_bytes)
    return dict(zip(_STAGE, (row.stage, " ".join(map(str, row.workers)), row.layers, *times, *sizes)))


def _happened(occurrences: Iterable[Occurrence]) -> list[dict[str, Any]]:
    return [{name: getattr(each, name) for name in _OCCURRENCE} for each in occurrences]


def _arrays_text(columns: Sequence[str], arrays: OpArrays) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    values = zip(columns, arrays.lists())
    writer.writerows(zip(*(map(chr, each) if name in ("kind", "way") else each for name, each in values)))
    return text.getvalue()


def table_text(columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> str:
    """Records as CSV with a line of column names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows([{column: _safe(value) for column, value in record.items()} for record in records])
    return text.getvalue()


def columns_of(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of all records, in the order of their first use."""
    return list(dict.fromkeys(column for record in records for column in record))


def _safe(value: Any) -> Any:
    """The value, with text escaped that a spreadsheet would interpret as a formula; nothing for NaN."""
    if value != value:  # NaN
        return ""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value
