"""The operations and messages of a run in Chrome's trace format, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from plait.report.arrays import MessageArrays, OpArrays
from plait.report.record import RunRecorded
from plait.report.run_data import RunData
from plait.report.timeline import LABELS

# The first bytes of a trace, by which it is known as one of Plait's.
MARK = '{"otherData":{"plait":"trace"},'
MEASURED, PREDICTED = 0, 1
# A worker's rows of messages have its number and multiples of this one.
_ROW = 1_000_000


def make_trace(data: RunData, recorded: RunRecorded) -> str:
    """All operations and messages of a run, the predicted first step, and what happened.

    Times are microseconds from the first operation or, without operations, from the first event.
    """
    line, ops, messages = data.timeline, recorded.ops, recorded.messages
    origin = line.origin if line is not None else data.origin
    events = [*_names(data), *_messages(messages, origin)]
    # Without operations of stages the timeline has the steps, evaluations and checkpoints.
    if len(ops):
        events += _bars(ops, MEASURED, origin)
    elif line is not None:
        events += _bars(line.ops, MEASURED, 0.0)
    if line is not None and len(line.anchors):
        events += _bars(line.predicted, PREDICTED, -float(line.anchors[0]))
    for each in (*data.changes, *data.faults):
        text = f"{each.what}: {each.why}"
        event = {"name": text, "ph": "i", "s": "g", "ts": _micro(each.t - origin), "pid": 0, "tid": 0}
        events.append(json.dumps(event))
    joined = ",\n".join(events)
    return f'{MARK}"traceEvents":[\n{joined}\n]}}\n'


def _names(data: RunData) -> Iterator[str]:
    processes = {MEASURED: data.name, PREDICTED: "predicted by the plan"}
    for number, name in processes.items():
        if number == MEASURED or data.plan is not None:
            yield json.dumps({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}})
    for worker in data.timeline.workers if data.timeline is not None else ():
        for number in processes if data.plan is not None else (MEASURED,):
            yield from _thread(number, worker, f"worker {worker}")


def _thread(process: int, number: int, name: str) -> Iterator[str]:
    """The name of a row, and its place: the rows of one worker are next to each other."""
    row, worker = divmod(number, _ROW)
    thread = {"ph": "M", "pid": process, "tid": number}
    yield json.dumps({"name": "thread_name", **thread, "args": {"name": name}})
    yield json.dumps({"name": "thread_sort_index", **thread, "args": {"sort_index": worker * 1000 + row}})


def _messages(messages: MessageArrays, origin: float) -> Iterator[str]:
    """Rows of each worker with the messages that it received and sent, and an arrow for each message.

    Bars of a row must not overlap, so sends that do are in further rows.
    """
    sent: dict[tuple[int, ...], int] = {}
    rows: dict[int, list[int]] = {}
    # A send counts from its start and a receive from its end: so each message is sent before it is received.
    order = np.argsort(np.where(messages.ways == ord("s"), messages.starts, messages.ends), kind="stable")
    for number, each in enumerate(zip(*messages.take(order).lists())):
        worker, code, stage, microbatch, start, end, way, peer, peer_stage, size = each
        began, micros = _micro(start - origin), max(1, _micro(end - start))
        letter, is_sent = chr(code), way == ord("s")
        ends = (worker, stage, peer, peer_stage) if is_sent else (peer, peer_stage, worker, stage)
        key = (*ends, letter == "F", microbatch)
        row, free_at = 1, rows.setdefault(worker, [])
        if is_sent:
            row, sent[key] = 2 + _free_row(free_at, began, began + micros), number
        place = f'"cat":"message","pid":{MEASURED},"tid":{worker + row * _ROW}'
        name = f"{'send' if is_sent else 'receive'} {letter}{microbatch}"
        yield (
            f'{{"name":"{name}","ph":"X","ts":{began},"dur":{micros},{place},"args":{{"stage":{stage},'
            f'"peer":{peer},"peer_stage":{peer_stage},"bytes":{size}}}}}'
        )
        if is_sent:
            yield f'{{"name":"message","ph":"s","id":{number},"ts":{began},{place}}}'
        elif (arrow := sent.pop(key, None)) is not None:
            yield f'{{"name":"message","ph":"f","bp":"e","id":{arrow},"ts":{began + micros - 1},{place}}}'
    for worker, free_at in sorted(rows.items()):
        for row in range(1, 2 + len(free_at)):
            verb = "receives" if row == 1 else "sends"
            yield from _thread(MEASURED, worker + row * _ROW, f"worker {worker} {verb}")


def _free_row(free_at: list[int], began: int, ended: int) -> int:
    """The first row that is free at `began`, which is taken until `ended`; may add a row."""
    row = next((row for row, end in enumerate(free_at) if end <= began), len(free_at))
    free_at[row : row + 1] = [ended]
    return row


def _bars(ops: OpArrays, process: int, origin: float) -> Iterator[str]:
    for worker, code, stage, number, start, end in zip(*ops.lists()):
        letter = chr(code)
        name = f"{LABELS.get(letter, letter)} {number}"
        yield (
            f'{{"name":"{name}","cat":"{letter}","ph":"X","ts":{_micro(start - origin)},'
            f'"dur":{_micro(end - start)},"pid":{process},"tid":{worker},"args":{{"stage":{stage}}}}}'
        )


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
