"""The pipeline runtime: two workers against one and against torch.distributed.pipelining, and further parts.

All sides of a model run in one world, in turn, one thread a worker; ratios are of medians.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from plait.comm.rendezvous import Rendezvous
from plait.launcher.worker_process import Worker
from plait.planner.schedules.in_flight import Schedule
from plait_bench.harness import (
    Bench,
    BenchClaim,
    Found,
    Row,
    at_least,
    in_turns,
    in_world,
    number,
    run_parts,
    seconds_of_all,
    spread,
)
from plait_bench.pipeline import comparison, convergence, idle, memory, prediction, recording, sides

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
    return run_parts("pipeline", command, parts, PARTS)


def speed(
    models: tuple[str, ...] = ("mlp", "transformer", "wide"), repeats: int = 3, steps: int = 3
) -> Found:
    """Time every side of every model `repeats` times, `steps` steps each time.

    Asynchronous schedules go on for four times as many: they fill and drain once, not in every step.
    """
    asked = {"repeats": repeats, "count": steps}
    worlds = [in_world(2, time_sides, {"model": model, **asked}) for model in models]
    rows = [row for world in worlds for row in world[0]]
    return rows, _claims(rows)


def time_sides(worker: Worker, model: str, repeats: int, count: int) -> list[Row]:
    """Be one of the two workers that time all sides of one model."""
    made = sides.MODELS[model]
    runners = _runners(worker.rendezvous, made.build(), made.batch())

    def timed(name: str, steps: sides.Steps) -> Callable[[bool], float]:
        longer = count * (4 if name in ASYNCHRONOUS else 1)

        def seconds(counts: bool) -> float:
            taken = longer if counts else 1
            return seconds_of_all(lambda: steps(taken)) / taken

        return seconds

    seconds = in_turns({name: timed(name, steps) for name, steps in runners.items()}, repeats)
    return [_speed_row(model, name, seconds) for name in runners]


def _runners(rendezvous: Rendezvous, model: nn.Sequential, batch: Any) -> dict[str, sides.Steps]:
    """All sides of one model, each with a copy of it."""
    rank = rendezvous.rank
    found = {"one worker": sides.alone(rank, copy.deepcopy(model), batch, PIECES)}
    found[APART] = sides.alone(0, copy.deepcopy(model), batch, PIECES)
    found["DDP"] = sides.data_parallel(rank, copy.deepcopy(model), batch, PIECES)
    for schedule in (*COMPARED, Schedule.STASH, Schedule.TWO_BUFFERED):
        stages = 4 if schedule is Schedule.INTERLEAVED else 2
        own = copy.deepcopy(model)
        found[schedule.value] = sides.ours(rendezvous, own, batch, schedule, stages, PIECES)[0]
    for schedule in COMPARED:
        stages = 4 if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE) else 2
        own = copy.deepcopy(model)
        found[f"torch {schedule.value}"] = sides.theirs(rank, own, batch, schedule, stages, PIECES)
    return found


def _speed_row(model: str, side: str, seconds: dict[str, list[float]]) -> Row:
    own, one = seconds[side], statistics.median(seconds["one worker"])
    batches = 2 if side == APART else 1
    return {
        "case": model,
        "side": side,
        **spread(own, "step_s", "step_min_s", "step_max_s"),
        "speedup": batches * one / statistics.median(own),
        "repeats": len(own),
    }


def _claims(rows: list[Row]) -> list[BenchClaim]:
    """What was said before measuring, with what was found."""
    speed = {(r["case"], r["side"]): number(r, "speedup") for r in rows if "speedup" in r}
    claims = []
    for model in dict.fromkeys(case for case, _ in speed):
        for side in ASYNCHRONOUS if model in GOALS else ():
            own = speed[model, side]
            claims.append(at_least(f"{model}: {side} over one worker", own, GOALS[str(model)]))
            claims.append(at_least(f"{model}: {side} over DDP", own / speed[model, "DDP"], 1.0))
            claims.append(at_least(f"{model}: {side} over {APART}", own / speed[model, APART], 0.94))
        goal = 1.1 if model == "wide" else 1.03
        for schedule in COMPARED:
            ratio = speed[model, schedule.value] / speed[model, f"torch {schedule.value}"]
            claims.append(at_least(f"{model}: {schedule.value} over torch's", ratio, goal))
    return claims


PARTS: Mapping[str, Callable[[], Found]] = {
    "speed": speed,
    "idle": idle.run,
    "recording": recording.run,
    "prediction": prediction.run,
    "memory": memory.run,
    "comparison": comparison.run,
    "convergence": convergence.run,
}
