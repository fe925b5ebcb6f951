"""Idle shares: every schedule with layers that sleep instead of computing, against its exact makespan.

Forward, the input's gradient and the weights' gradient sleep for 50 ms each, so the workers need no
processors. What counts as work is what these sleeps take by themselves, with all workers asleep, and nothing
else: messages, updates and the runtime's own doings are idle time here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from plait.comm.collectives import all_gather_values
from plait.core.codec import encode
from plait.launcher.worker_process import Worker
from plait.pipeline.op_timings import OpTiming
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.operations import Backward, Forward, Op, Update
from plait.planner.schedules.orders import operations
from plait.planner.schedules.simulator import SimulatedLink, StageCosts, simulate
from plait.schema.plans.plan import Layout
from plait_bench.harness import Found, Row, ends_of, in_world, number, say, spread, within
from plait_bench.pipeline import sides
from plait_bench.sleeping import Sleeping

PIECES = 8
SLEEP_S = 0.05
# Stages that a worker of an interleaved pipeline holds.
CHUNKS = 2
# Batches that an asynchronous pipeline takes; the first and last of them fill and drain it.
STREAM = 5
SCHEDULES = tuple(schedule for schedule in Schedule if schedule is not Schedule.NONE)


def run(
    depths: Sequence[int] = (2, 4, 8),
    repeats: int = 3,
    schedules: Sequence[Schedule] = SCHEDULES,
    stream: int = STREAM,
) -> Found:
    """The idle share of each schedule on each number of workers, the median of `repeats`."""
    names = [schedule.value for schedule in schedules]
    asked = {"repeats": repeats, "schedules": names, "stream": stream}
    worlds = [in_world(workers, measure_schedules, asked) for workers in depths]
    rows: list[Row] = [row for world in worlds for row in world[0]]
    # In the steady state of asynchronous schedules the exact share is zero.
    words = "points of idle share over the exact makespan"
    claims = []
    for row in rows:
        least, most = (100 * (end - number(row, "exact_idle_share")) for end in ends_of(row, "idle_share"))
        over = number(row, "points_over")
        claims.append(within(f"{row['case']}, {row['side']}: {words}", over, 2, (least, most)))
    return rows, claims


def measure_schedules(worker: Worker, repeats: int, schedules: list[str], stream: int) -> list[Row]:
    """Be one of the workers that measure the idle share of each schedule with sleeping layers."""
    torch.manual_seed(0)
    sleep_s = _sleep_s()
    return [_row(worker, schedule, repeats, stream, sleep_s) for schedule in map(Schedule, schedules)]


def _sleep_s(times: int = 20) -> float:
    """Seconds that a sleep really takes, the mean over all workers, which sleep at the same time."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        time.sleep(SLEEP_S)
    mean = torch.tensor((time.perf_counter() - started) / times, dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _row(worker: Worker, schedule: Schedule, repeats: int, stream: int, sleep_s: float) -> Row:
    say(f"idle, {schedule.value}: {repeats} times")
    size = worker.world_size
    stages = size * (CHUNKS if schedule is Schedule.INTERLEAVED else 1)
    model = nn.Sequential(*(Sleeping(None, SLEEP_S, SLEEP_S, SLEEP_S) for _ in range(stages)))
    batch = (torch.randn(PIECES, 4), torch.randn(PIECES, 4))
    steps, made = sides.ours(worker.rendezvous, model, batch, schedule, stages, PIECES)
    steps(1)
    measured = []
    for _ in range(repeats):
        dist.barrier()
        made.pipeline.timings.clear()
        steps(1 if schedule.synchronous else stream)
        own = [[type(s.op).__name__, encode(s.op), s.start, s.end] for s in made.pipeline.timings.ops]
        everywhere = [[_timing(*each) for each in timings] for timings in all_gather_values(own)]
        measured.append(idle_share(schedule, everywhere, sleep_s))
    made.close()
    exact, found = exact_idle_share(schedule, size), statistics.median(measured)
    return {
        "case": f"sleeping, {size} workers",
        "side": schedule.value,
        **spread(measured, "idle_share"),
        "exact_idle_share": exact,
        "points_over": 100 * (found - exact),
        "sleep_s": sleep_s,
        "repeats": repeats,
    }


def _timing(kind: str, op: dict[str, Any], start: float, end: float) -> OpTiming:
    made = next(each for each in get_args(Op) if each.__name__ == kind)
    return OpTiming(made(**op), start, end)


def idle_share(schedule: Schedule, timings: Sequence[Sequence[OpTiming]], sleep_s: float) -> float:
    """The share of the workers' time without work, from first operation to last, or in the steady state.

    `timings` are each worker's; `sleep_s` is what a sleep takes.
    """
    own = [[timing for timing in each if not isinstance(timing.op, Update)] for each in timings]
    if schedule.synchronous:
        begin, end = min(each[0].start for each in own), max(each[-1].end for each in own)
        sleeps = sum(_sleeps(each) for each in own)
        return 1 - sleep_s * sleeps / (len(own) * (end - begin))
    return statistics.mean(_steady_idle(each, sleep_s) for each in own)


def _steady_idle(timings: Sequence[OpTiming], sleep_s: float) -> float:
    """The idle share of one worker while forward and backward take turns, away from both ends."""
    first, last = len(timings) // 3, 2 * len(timings) // 3
    if isinstance(timings[first].op, Forward) != isinstance(timings[last].op, Forward):
        last += 1
    window = timings[first:last]
    return 1 - sleep_s * _sleeps(window) / (timings[last].start - timings[first].start)


def _sleeps(timings: Sequence[OpTiming]) -> int:
    """How often layers slept in these operations: a whole backward has two halves."""
    return sum(2 if isinstance(timing.op, Backward) else 1 for timing in timings)


def exact_idle_share(schedule: Schedule, size: int) -> float:
    """The idle share of the exact makespan: messages and updates cost nothing."""
    if not schedule.synchronous:
        return 0.0
    chunks = CHUNKS if schedule is Schedule.INTERLEAVED else 1
    layout = Layout(tuple((stage % size,) for stage in range(size * chunks)))
    cost = StageCosts(SLEEP_S, 2 * SLEEP_S, 0.0, weight_share=0.5)
    replay = simulate(
        layout,
        operations(schedule, layout, PIECES),
        [cost] * len(layout.stages),
        lambda sender, receiver: SimulatedLink(1e18, 0.0),
    )
    return 1 - 3 * chunks * SLEEP_S * PIECES / replay.end_s
