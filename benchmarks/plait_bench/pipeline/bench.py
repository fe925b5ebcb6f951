"""The pipeline runtime: two workers against one and against torch.distributed.pipelining, and further parts.

All sides of a model run in one world, in turn, one thread a worker; ratios are of medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from plait.comm.rendezvous import Rendezvous
from plait.launch.worker import Worker
from plait.planner.schedules.kinds import Schedule
from plait_bench.harness import Bench, BenchClaim, Row
from plait_bench.pipeline import comparison, convergence, idle, memory, prediction, recording
from plait_bench.pipeline import sides as sides
from plait_bench.world import in_world

PIECES = 8
COMPARED = (Schedule.FLUSH, Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)
ASYNCHRONOUS = ("stash", "2bw")
GOALS = {"mlp": 1.88, "transformer": 1.94}
# Each of two workers trains by itself, at the same time: what the machine's cores do with torch's own layers.
APART = "two workers apart"
# The parts that take minutes, not more.
QUICK = ("speed", "idle", "recording")


def run(parts: Sequence[str] = QUICK, command: str = "plait bench pipeline") -> Bench:
    """The `parts` asked for, one after the other."""
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    for part in parts:
        found, claimed = PARTS[part]()
        rows += found
        claims += claimed
    return Bench("pipeline", command, tuple(rows), tuple(claims))


def speed(
    models: tuple[str, ...] = ("mlp", "transformer", "wide"),
    repeats: int = 3,
    steps: int = 3,
    peer: bool = True,
) -> tuple[list[Row], list[BenchClaim]]:
    """Time every side of every model `repeats` times, `steps` steps each time.

    Asynchronous schedules go on for four times as many: they fill and drain once, not in every step.
    Without `peer`, torch.distributed.pipelining is left out, and what is claimed against it.
    """
    rows: list[Row] = []
    for model in models:
        asked = {"model": model, "repeats": repeats, "steps": steps, "peer": peer}
        rows += in_world(2, f"{__name__}:speed_worker", asked)["rows"]
    return rows, _claims(rows)


def speed_worker(worker: Worker, settings: dict[str, Any]) -> dict[str, Any]:
    """Be one of the two workers that time all sides of one model."""
    worker.join("gloo")
    made = sides.MODELS[settings["model"]]
    runners = _runners(worker.rendezvous, made.build(), made.batch(), COMPARED if settings["peer"] else ())
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for round_ in range(settings["repeats"] + 1):
        for name, steps in runners.items():
            count = settings["steps"] * (4 if name in ASYNCHRONOUS else 1) if round_ else 1
            dist.barrier()
            started = time.perf_counter()
            steps(count)
            dist.barrier()
            if round_:
                seconds[name].append((time.perf_counter() - started) / count)
    return {"rows": [_speed_row(settings["model"], name, seconds) for name in runners]}


def _runners(
    rendezvous: Rendezvous, model: nn.Sequential, batch: Any, compared: tuple[Schedule, ...]
) -> dict[str, sides.Steps]:
    """All sides of one model, each with a copy of it."""
    rank = rendezvous.rank
    found = {"one worker": sides.alone(rank, sides.copy_of(model), batch, PIECES)}
    found[APART] = sides.alone(0, sides.copy_of(model), batch, PIECES)
    found["DDP"] = sides.data_parallel(rank, sides.copy_of(model), batch, PIECES)
    for schedule in (*COMPARED, Schedule.STASH, Schedule.TWO_BUFFERED):
        stages = 4 if schedule is Schedule.INTERLEAVED else 2
        copy = sides.copy_of(model)
        found[schedule.value] = sides.ours(rendezvous, copy, batch, schedule, stages, PIECES)[0]
    for schedule in compared:
        stages = 4 if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE) else 2
        copy = sides.copy_of(model)
        found[f"torch {schedule.value}"] = sides.theirs(rank, copy, batch, schedule, stages, PIECES)
    return found


def _speed_row(model: str, side: str, seconds: dict[str, list[float]]) -> Row:
    own, one = seconds[side], statistics.median(seconds["one worker"])
    batches = 2 if side == APART else 1
    return {
        "case": model,
        "side": side,
        "step_s": statistics.median(own),
        "step_min_s": min(own),
        "step_max_s": max(own),
        "speedup": batches * one / statistics.median(own),
        "repeats": len(own),
    }


def _claims(rows: list[Row]) -> list[BenchClaim]:
    """What was said before measuring, with what was found."""
    speed = {(r["case"], r["side"]): float(r["speedup"] or 0) for r in rows if "speedup" in r}
    claims = []
    for model in dict.fromkeys(case for case, _ in speed):
        for side in ASYNCHRONOUS if model in GOALS else ():
            own = speed[model, side]
            claims.append(_at_least(f"{model}: {side} over one worker", own, GOALS[str(model)]))
            claims.append(_at_least(f"{model}: {side} over DDP", own / speed[model, "DDP"], 1.0))
            claims.append(_at_least(f"{model}: {side} over {APART}", own / speed[model, APART], 0.94))
        goal = 1.1 if model == "wide" else 1.03
        for schedule in (s for s in COMPARED if (model, f"torch {s.value}") in speed):
            ratio = speed[model, schedule.value] / speed[model, f"torch {schedule.value}"]
            claims.append(_at_least(f"{model}: {schedule.value} over torch's", ratio, goal))
    return claims


def _at_least(claim: str, value: float, goal: float) -> BenchClaim:
    return BenchClaim(claim, value, f"at least {goal:g}", value >= goal)


Part = Callable[[], tuple[list[Row], list[BenchClaim]]]
PARTS: Mapping[str, Part] = {
    "speed": speed,
    "idle": idle.run,
    "recording": recording.run,
    "prediction": prediction.run,
    "memory": memory.run,
    "comparison": comparison.run,
    "convergence": convergence.run,
}
