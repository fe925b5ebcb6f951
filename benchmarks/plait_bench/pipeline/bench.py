"""The pipeline runtime: two workers against one and against torch.distributed.pipelining, and further parts.

All sides of a model run in one world, in turn, one thread a worker; ratios are of medians.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
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
    ends_of,
    ends_of_ratio,
    in_turns,
    in_world,
    number,
    run_parts,
    seconds_of_all,
    spread,
)
from plait_bench.pictures import draw_panels
from plait_bench.pipeline import comparison, convergence, idle, memory, prediction, recording, sides

PIECES = 8
COMPARED = (Schedule.FLUSH, Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)
ASYNCHRONOUS = ("stash", "2bw")
GOALS = {"mlp": 1.88, "transformer": 1.94}
# Each of two workers trains by itself, at the same time: what the machine's cores do with torch's own layers.
APART = "two workers apart"
# What asynchronous schedules are at least, of other sides.
OVER = (("DDP", 1.0), (APART, 0.94))
# The parts that take minutes, not more.
DEFAULT = ("speed", "idle", "recording")
QUICK_SIDES = ("one worker", APART, "DDP", "flush", "torch flush", "stash")


def run(parts: Sequence[str] = DEFAULT, command: str = "plait bench pipeline", quick: bool = False) -> Bench:
    """The `parts` asked for, one after the other; the quick course has one model and fewer sides."""
    if not quick:
        return run_parts("pipeline", command, parts, PARTS)
    known = {
        **PARTS,
        "speed": lambda: speed(("mlp",), 3, 1, QUICK_SIDES),
        "idle": lambda: idle.run((2,), 2, (Schedule.FLUSH, Schedule.STASH), stream=3),
    }
    return run_parts("pipeline", command, [part for part in parts if part in ("speed", "idle")], known)


def speed(
    models: tuple[str, ...] = ("mlp", "transformer", "wide"),
    repeats: int = 3,
    steps: int = 3,
    only: Sequence[str] = (),
) -> Found:
    """Time every side of every model, or `only` some, `repeats` times, `steps` steps each time.

    Asynchronous schedules go on for four times as many: they fill and drain once, not in every step.
    """
    asked = {"repeats": repeats, "count": steps, "only": list(only)}
    worlds = [in_world(2, time_sides, {"model": model, **asked}) for model in models]
    rows = [row for world in worlds for row in world[0]]
    return rows, _claims(rows)


def time_sides(worker: Worker, model: str, repeats: int, count: int, only: list[str]) -> list[Row]:
    """Be one of the two workers that time all sides of one model, or `only` some."""
    made = sides.MODELS[model]
    runners = {
        name: make()
        for name, make in _runners(worker.rendezvous, made.build(), made.batch()).items()
        if not only or name in only
    }

    def timed(name: str, steps: sides.Steps) -> Callable[[bool], float]:
        longer = count * (4 if name in ASYNCHRONOUS else 1)

        def seconds(counts: bool) -> float:
            taken = longer if counts else 1
            return seconds_of_all(lambda: steps(taken)) / taken

        return seconds

    seconds = in_turns({name: timed(name, steps) for name, steps in runners.items()}, repeats)
    return [_speed_row(model, name, seconds) for name in runners]


def _runners(
    rendezvous: Rendezvous, model: nn.Sequential, batch: Any
) -> dict[str, Callable[[], sides.Steps]]:
    """What makes each side of one model, with a copy of it."""
    rank = rendezvous.rank

    def ours(schedule: Schedule) -> sides.Steps:
        stages = 4 if schedule is Schedule.INTERLEAVED else 2
        return sides.ours(rendezvous, copy.deepcopy(model), batch, schedule, stages, PIECES)[0]

    def theirs(schedule: Schedule) -> sides.Steps:
        stages = 4 if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE) else 2
        return sides.theirs(rank, copy.deepcopy(model), batch, schedule, stages, PIECES)

    all_ours = (*COMPARED, Schedule.STASH, Schedule.TWO_BUFFERED)
    return {
        "one worker": lambda: sides.alone(rank, copy.deepcopy(model), batch, PIECES),
        APART: lambda: sides.alone(0, copy.deepcopy(model), batch, PIECES),
        "DDP": lambda: sides.data_parallel(rank, copy.deepcopy(model), batch, PIECES),
        **{schedule.value: functools.partial(ours, schedule) for schedule in all_ours},
        **{f"torch {schedule.value}": functools.partial(theirs, schedule) for schedule in COMPARED},
    }


def _speed_row(model: str, side: str, seconds: dict[str, list[float]]) -> Row:
    own, one = seconds[side], statistics.median(seconds["one worker"])
    batches = 2 if side == APART else 1
    return {
        "case": model,
        "side": side,
        **spread(own, "step_s"),
        **spread([batches * one / each for each in own], "speedup"),
        "repeats": len(own),
    }


def _claims(rows: list[Row]) -> list[BenchClaim]:
    """What was said before measuring, with what was found."""
    claims = []
    for model in dict.fromkeys(str(row["case"]) for row in rows):
        side_of = {str(row["side"]): row for row in rows if row["case"] == model}
        for side in (side for side in ASYNCHRONOUS if model in GOALS and side in side_of):
            own = side_of[side]
            words, ends = f"{model}: {side} over one worker", ends_of(own, "speedup")
            claim = at_least(words, number(own, "speedup"), GOALS[model], ends=ends)
            claims.append(_where_cores_are_free(claim, side_of, GOALS[model]))
            claims += [_over(own, side_of[other], other, goal) for other, goal in OVER if other in side_of]
        goal = 1.1 if model == "wide" else 1.03
        compared = [side for side in side_of if f"torch {side}" in side_of]
        claims += [_over(side_of[side], side_of[f"torch {side}"], "torch's", goal) for side in compared]
    return claims


def _where_cores_are_free(claim: BenchClaim, side_of: Mapping[str, Row], goal: float) -> BenchClaim:
    """The claim, not resolved where two workers that train apart do not reach its goal either."""
    apart = side_of.get(APART)
    if claim.holds or apart is None or number(apart, "speedup") >= goal:
        return claim
    why = f"{APART} come to {number(apart, 'speedup'):.3g}, so two cores were not free"
    return replace(claim, unresolved=why)


def _over(own: Row, other: Row, words: str, goal: float) -> BenchClaim:
    ratio = number(own, "speedup") / number(other, "speedup")
    ends = ends_of_ratio(own, other, "speedup")
    return at_least(f"{own['case']}: {own['side']} over {words}", ratio, goal, ends=ends)


def write_plot(bench: Bench, path: Path) -> None:
    """Throughput over one worker, and idle shares, a bar for each side."""
    columns = {"throughput over one worker": "speedup", "idle share of a step": "idle_share"}
    panels = {label: ([r for r in bench.rows if column in r], column) for label, column in columns.items()}
    draw_panels(bench, path, panels, lambda row: str(row["case"]), "side")


PARTS: Mapping[str, Callable[[], Found]] = {
    "speed": speed,
    "idle": idle.run,
    "recording": recording.run,
    "prediction": prediction.run,
    "memory": memory.run,
    "comparison": comparison.run,
    "convergence": convergence.run,
}
