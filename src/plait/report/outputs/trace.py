"""The operations of a run in Chrome's trace format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator

from plait.report.record import OpArrays
from plait.report.run_data import RunData
from plait.report.timeline import LABELS

# The first bytes of a trace, by which it is known as one of Plait's.
MARK = '{"otherData":{"plait":"trace"},'
MEASURED, PREDICTED = 0, 1


def make_trace(data: RunData, ops: OpArrays) -> str:
    """All operations of a run, the predicted first step, losses as a counter, and what happened.

    Times are microseconds from the first operation or, without operations, from the first event.
    """
    line = data.timeline
    origin = line.origin if line is not None else data.origin
    events = [*_names(data)]
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
            thread = {"name": "thread_name", "ph": "M", "pid": number, "tid": worker}
            yield json.dumps({**thread, "args": {"name": f"worker {worker}"}})


def _bars(ops: OpArrays, process: int, origin: float) -> Iterator[str]:
    columns = (ops.workers, ops.letters, ops.stages, ops.microbatches, ops.starts, ops.ends)
    for worker, code, stage, number, start, end in zip(*(column.tolist() for column in columns)):
        letter = chr(code)
        name = f"{LABELS.get(letter, letter)} {number}"
        yield (
            f'{{"name":"{name}","cat":"{letter}","ph":"X","ts":{_micro(start - origin)},'
            f'"dur":{_micro(end - start)},"pid":{process},"tid":{worker},"args":{{"stage":{stage}}}}}'
        )


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
