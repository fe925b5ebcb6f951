"""The pipeline runtime: two workers against one and against torch.distributed.pipelining, and idle shares.

All sides of a model run in one world, in turn, one thread a worker; ratios are of medians. Idle shares are
measured with layers that sleep instead of computing, so they need no processors.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.cluster.hosts import LOCAL, Host
from plait.cluster.supervisor import Launch, Supervisor, Unwatched
from plait.cluster.worker import Worker
from plait.experiments import pipeline_sides as sides
from plait.experiments.bench import Bench, Claim, Row
from plait.planner.depth import Schedule
from plait.planner.operations import straight_layout
from plait.planner.schedules import operations
from plait.planner.simulator import Link, StageCosts, simulate

PIECES = 8
SLEEP_S = 0.05
COMPARED = (Schedule.FLUSH, Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)
GOALS = {"mlp": 1.88, "transformer": 1.94}


def run(
    models: tuple[str, ...] = ("mlp", "transformer", "wide"),
    depths: tuple[int, ...] = (2, 4, 8),
    repeats: int = 5,
    steps: int = 4,
    peer: bool = True,
    command: str = "plait bench pipeline",
) -> Bench:
    """Time every side of every model `repeats` times, and the idle share at every depth.

    Without `peer`, torch.distributed.pipelining is left out, and what is claimed against it.
    """
    rows: list[Row] = []
    for model in models:
        asked = {"model": model, "repeats": repeats, "steps": steps, "peer": peer}
        rows += _in_world(2, "speed_worker", asked)
    for workers in depths:
        rows += _in_world(workers, "idle_worker", {"workers": workers})
    return Bench("pipeline", command, tuple(rows), tuple(_claims(rows)))


def _in_world(workers: int, entry: str, settings: dict[str, Any]) -> list[Row]:
    with tempfile.TemporaryDirectory() as logs:
        launch = Launch(
            hosts=(Host(LOCAL, workers),),
            entry=f"plait.experiments.pipeline:{entry}",
            settings=settings,
            logs=Path(logs),
            threads=1,
        )
        rows: list[Row] = Supervisor(launch, Unwatched()).run()[0]["rows"]
    return rows


def speed_worker(worker: Worker, settings: dict[str, Any]) -> dict[str, Any]:
    """Be one of the two workers that time all sides of one model."""
    worker.join("gloo")
    made = sides.MODELS[settings["model"]]
    runners = _runners(worker.rank, made.build(), made.batch(), COMPARED if settings["peer"] else ())
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for round_ in range(settings["repeats"] + 1):
        for name, steps in runners.items():
            dist.barrier()
            started = time.perf_counter()
            steps(settings["steps"])
            dist.barrier()
            if round_:
                seconds[name].append((time.perf_counter() - started) / settings["steps"])
    return {"rows": [_speed_row(settings["model"], name, seconds) for name in runners]}


def _runners(
    rank: int, model: nn.Sequential, batch: Any, compared: tuple[Schedule, ...]
) -> dict[str, sides.Steps]:
    """All sides of one model, each with a copy of it."""
    found = {"one worker": sides.alone(rank, sides.copy_of(model), batch, PIECES)}
    found["DDP"] = sides.data_parallel(rank, sides.copy_of(model), batch, PIECES)
    for schedule in (*COMPARED, Schedule.STASH, Schedule.TWO_BUFFERED):
        stages = 4 if schedule is Schedule.INTERLEAVED else 2
        copy = sides.copy_of(model)
        found[schedule.value] = sides.ours(rank, copy, batch, schedule, stages, PIECES)[0]
    for schedule in compared:
        stages = 4 if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE) else 2
        copy = sides.copy_of(model)
        found[f"torch {schedule.value}"] = sides.theirs(rank, copy, batch, schedule, stages, PIECES)
    return found


def _speed_row(model: str, side: str, seconds: dict[str, list[float]]) -> Row:
    own, one = seconds[side], statistics.median(seconds["one worker"])
    return {
        "case": model,
        "side": side,
        "step_s": statistics.median(own),
        "step_min_s": min(own),
        "step_max_s": max(own),
        "speedup": one / statistics.median(own),
        "repeats": len(own),
    }


def idle_worker(worker: Worker, settings: dict[str, Any]) -> dict[str, Any]:
    """Be one of the workers that measure the idle share of each schedule with sleeping layers."""
    worker.join("gloo")
    torch.manual_seed(0)
    rows: list[Row] = []
    for schedule in (Schedule.GPIPE, Schedule.FLUSH, Schedule.ZERO_BUBBLE, Schedule.STASH):
        model = nn.Sequential(*(sides.SleepingLayer(SLEEP_S) for _ in range(worker.world_size)))
        batch = (torch.randn(PIECES, 4), torch.randn(PIECES, 4))
        rows.append(_idle_row(worker, schedule, model, batch))
    return {"rows": rows}


def _idle_row(worker: Worker, schedule: Schedule, model: nn.Sequential, batch: Any) -> Row:
    size = worker.world_size
    steps, pipeline, channels = sides.ours(worker.rank, model, batch, schedule, size, PIECES)
    count = 1 if schedule.synchronous else 4
    steps(1 if schedule.synchronous else 2)
    dist.barrier()
    pipeline.spans.clear()
    steps(count)
    spans: list[Any] = [None] * size
    own = [(s.start, s.end) for s in pipeline.spans if not s.end - s.start < SLEEP_S / 2]
    dist.all_gather_object(spans, own)
    channels.close()
    expected, measured = _expected_idle(schedule, size), _idle(schedule, spans)
    return {
        "case": f"sleeping, {size} stages",
        "side": schedule.value,
        "idle_share": measured,
        "exact_idle_share": expected,
        "points_over": 100 * (measured - expected),
    }


def _idle(schedule: Schedule, spans: list[list[tuple[float, float]]]) -> float:
    """The share of time that workers wait, from the first operation to the last, or in the steady middle."""
    if schedule.synchronous:
        begin = min(s for own in spans for s, _ in own)
        end = max(e for own in spans for _, e in own)
    else:
        begin = max(own[len(own) // 3][0] for own in spans)
        end = min(own[2 * len(own) // 3][1] for own in spans)
    busy = sum(max(0.0, min(e, end) - max(s, begin)) for own in spans for s, e in own)
    return 1 - busy / (len(spans) * (end - begin))


def _expected_idle(schedule: Schedule, size: int) -> float:
    """The idle share of the exact makespan: messages and updates cost nothing."""
    if not schedule.synchronous:
        return 0.0
    layout = straight_layout([1] * size)
    cost = StageCosts(SLEEP_S, 2 * SLEEP_S, 0.0, weight_share=0.5)
    replay = simulate(
        layout,
        operations(schedule, layout, PIECES),
        [cost] * size,
        lambda a, b: Link(1e18, 0.0),
        lambda w: 1.0,
    )
    return 1 - 3 * SLEEP_S * PIECES / replay.end_s


def _claims(rows: list[Row]) -> list[Claim]:
    """What was said before measuring, with what was found."""
    speed = {(r["case"], r["side"]): float(r["speedup"] or 0) for r in rows if "speedup" in r}
    claims = []
    for model in dict.fromkeys(case for case, _ in speed):
        for side in ("stash", "2bw") if model in GOALS else ():
            claims.append(
                _at_least(f"{model}: {side} over one worker", speed[model, side], GOALS[str(model)])
            )
            ratio = speed[model, side] / speed[model, "DDP"]
            claims.append(_at_least(f"{model}: {side} over DDP", ratio, 1.0))
        goal = 1.1 if model == "wide" else 1.03
        for schedule in (s for s in COMPARED if (model, f"torch {s.value}") in speed):
            ratio = speed[model, schedule.value] / speed[model, f"torch {schedule.value}"]
            claims.append(_at_least(f"{model}: {schedule.value} over torch's", ratio, goal))
    for row in rows:
        if "points_over" in row:
            points = float(row["points_over"] or 0)
            words = f"{row['case']}, {row['side']}: points of idle share over the exact makespan"
            claims.append(Claim(words, points, "at most 2", points <= 2))
    return claims


def _at_least(claim: str, value: float, goal: float) -> Claim:
    return Claim(claim, value, f"at least {goal:g}", value >= goal)
