"""What recording costs: noting when each operation and each message began and ended, and writing it down.

The cost of the calls is measured by themselves, against the time of the operations that they note: a part
in a thousand drowns in the noise of two runs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from plait.core.events import EventLog
from plait.launcher.worker_process import Worker
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.op_timings import MessageTiming
from plait.planner.schedules.in_flight import Schedule
from plait_bench.harness import BenchClaim, Found, Row, in_world, number
from plait_bench.pipeline import sides

PIECES = 8


def run(models: tuple[str, ...] = ("mlp", "transformer"), steps: int = 4) -> Found:
    """The share of a run's time that goes into recording its operations, on two workers."""
    rows: list[Row] = [in_world(2, record, {"model": model, "count": steps})[0] for model in models]
    claims = []
    for row in rows:
        percent = 100 * number(row, "share")
        words = f"{row['case']}: percent spent on recording"
        claims.append(BenchClaim(words, percent, "under 1", percent < 1))
    return rows, claims


def record(worker: Worker, model: str, count: int) -> Row:
    """Be one of two workers: run a pipeline, then do all that recording it took once more, timed."""
    made = sides.MODELS[model]
    steps, ours = sides.ours(worker.rendezvous, made.build(), made.batch(), Schedule.STASH, 2, PIECES)
    pipeline = ours.pipeline
    steps(1)
    pipeline.timings.clear()
    dist.barrier()
    started = time.perf_counter()
    steps(count)
    run_s = time.perf_counter() - started
    operations, messages = len(pipeline.timings.ops), len(pipeline.timings.messages)
    record_s = statistics.median(_record_s(pipeline) for _ in range(5))
    dist.barrier()
    ours.close()
    return {
        "case": f"recording, {model}",
        "operations": operations,
        "messages": messages,
        "operation_s": run_s / operations,
        "record_s": record_s / operations,
        "share": record_s / run_s,
    }


def _record_s(pipeline: PipelineExecutor) -> float:
    """Seconds to note the operations and messages of the run again and to write them to a file."""
    ops, messages = list(pipeline.timings.ops), list(pipeline.timings.messages)
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.jsonl", 0)
        pipeline.timings.clear()
        started = time.perf_counter()
        for timing in ops:
            pipeline.record_timing(timing.op, time.time())
        for each in messages:
            again = MessageTiming(each.op, each.is_sent, each.peer, each.peer_stage, time.time(), 0.0)
            again.size = each.size
            again.finish()
            pipeline.timings.messages.append(again)
        for event in pipeline.timings.take(0, (0, 1)):
            log.record(event)
        log.flush()
        seconds = time.perf_counter() - started
        log.close()
    return seconds
