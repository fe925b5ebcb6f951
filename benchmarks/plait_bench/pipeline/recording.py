"""What recording costs: noting when each operation began and ended, and writing it down.

The cost of the calls is measured by themselves, against the time of the operations that they note: a part
in a thousand drowns in the noise of two runs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from plait.core.events import EventLog
from plait.launch.worker import Worker
from plait.pipeline.executor import Pipeline
from plait.pipeline.op_timings import operations_event
from plait.planner.schedules.kinds import Schedule
from plait_bench.harness import BenchClaim, Row
from plait_bench.pipeline import sides as sides
from plait_bench.world import in_world

PIECES = 8


def run(
    models: tuple[str, ...] = ("mlp", "transformer"), steps: int = 4
) -> tuple[list[Row], list[BenchClaim]]:
    """The share of a run's time that goes into recording its operations, on two workers."""
    rows: list[Row] = []
    for model in models:
        asked = {"model": model, "steps": steps}
        rows += in_world(2, f"{__name__}:recording_worker", asked)["rows"]
    claims = []
    for row in rows:
        percent = 100 * float(row["share"] or 0)
        claims.append(
            BenchClaim(f"{row['case']}: percent spent on recording", percent, "under 1", percent < 1)
        )
    return rows, claims


def recording_worker(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    """Be one of two workers: run a pipeline, then do all that recording it took once more, timed."""
    worker.join("gloo")
    made = sides.MODELS[asked["model"]]
    steps, pipeline, channels = sides.ours(
        worker.rendezvous, made.build(), made.batch(), Schedule.STASH, 2, PIECES
    )
    steps(1)
    pipeline.spans.clear()
    dist.barrier()
    started = time.perf_counter()
    steps(asked["steps"])
    run_s = time.perf_counter() - started
    operations = len(pipeline.spans)
    record_s = statistics.median(_record_s(pipeline) for _ in range(5))
    dist.barrier()
    channels.close()
    row: Row = {
        "case": f"recording, {asked['model']}",
        "operations": operations,
        "operation_s": run_s / operations,
        "record_s": record_s / operations,
        "share": record_s / run_s,
    }
    return {"rows": [row]}


def _record_s(pipeline: Pipeline) -> float:
    """Seconds to note the operations of the run again and to write them to a file."""
    spans = list(pipeline.spans)
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.jsonl", 0)
        pipeline.spans.clear()
        started = time.perf_counter()
        for span in spans:
            pipeline._note(span.op, time.time())
        log.record(operations_event(0, pipeline.spans))
        log.flush()
        seconds = time.perf_counter() - started
        log.close()
    return seconds
