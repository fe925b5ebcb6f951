"""Pipelines that change while they run: one loses a worker, in the other a worker becomes slower."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from plait.core.events import Recorded
from plait.core.run_events import Changed, Step, WorkersChanged
from plait.launcher.display import WorkerState
from plait.launcher.run_dir import RunDir
from plait.measure.auto_plan import settings_before
from plait.planner import save_plan
from plait.planner.replan import plan_for
from plait.training.change.replanning import plan_and_graph
from plait_bench.adapt.driver import KillWorker, apart, job, trained
from plait_bench.harness import Found, Row, at_least, at_most, number, of_repeats, of_runs
from plait_bench.sleeping import Sleeping

NAME = "pipelines"
STAGES, LAYERS, PIECES = 4, 12, 8
# What a layer takes for a microbatch, forward and backward, whatever the machine.
FORWARD_S, BACKWARD_S = 0.001, 0.002
SLOW_WORKER, SLOWER = 2, 3.0
LOST_GOAL_S, LOSS_GOAL, SPEED_GOAL = 10.0, 1e-9, 0.85
QUIET_STEPS = 30
# Steps whose median is a run's pace.
TIMED = 20
REPEATS = 3
REPLANNED, KNEW = "re-planned", "a plan that knew"


def timed_layers(slow: str) -> nn.Module:
    """Layers that take a known time, or longer on the worker that the file `slow` names, once it is there."""

    def layer() -> nn.Module:
        return Sleeping(nn.Linear(64, 64), FORWARD_S, BACKWARD_S, slow=slow)

    return nn.Sequential(nn.Flatten(), *(layer() for _ in range(LAYERS)), nn.Linear(64, 10))


def _slow_down(folder: Path) -> None:
    (folder / "slow").write_text(f"{SLOW_WORKER} {SLOWER}")


def _job(folder: Path, parallel: Mapping[str, Any], steps: int, **more: Any) -> dict[str, Any]:
    staged = {"workers": STAGES, "plan": "model-parallel", "schedule": "flush", "microbatches": PIECES}
    return job(
        NAME,
        str(folder),
        {**staged, **parallel},
        model=f"{__name__}:timed_layers",
        model_args={"slow": str(folder / "slow")},
        precision="float64",
        checkpoint={"every_steps": 20},
        steps=steps,
        **more,
    )


def lost_row() -> Row:
    """A pipeline of four stages that loses a worker, beside one that does not."""
    steps = 2 * QUIET_STEPS + 20
    kill = KillWorker(SLOW_WORKER)
    with tempfile.TemporaryDirectory() as name:
        _, lost = trained(_job(Path(name), {"elastic": True}, steps), [(0, kill)], QUIET_STEPS)
    with tempfile.TemporaryDirectory() as name:
        _, fixed = trained(_job(Path(name), {}, steps), [], QUIET_STEPS)
    at, change = next((line.t, line.event) for line in lost if isinstance(line.event, WorkersChanged))
    after = next(line for line in lost if isinstance(line.event, Step) and line.t > at)
    assert kill.at is not None
    return {
        "case": "a pipeline loses a worker",
        "model": "timed layers",
        "workers": STAGES,
        "then": len(change.members),
        "stall_s": round(after.t - kill.at, 3),
        "apart": apart(lost, fixed),
    }


def slow_rows(steps: int = 150) -> list[Row]:
    """The pace of a pipeline in which a worker becomes slower, and of one whose plan knew of it."""

    def slow(folder: RunDir, _: tuple[WorkerState, ...]) -> None:
        _slow_down(folder.path.parent)

    with tempfile.TemporaryDirectory() as name:
        changing = _job(Path(name), {}, steps, adapt=[{"kind": "plan"}])
        folder, adapted = trained(changing, [(0, slow)], QUIET_STEPS)
        settings = settings_before(folder.settings)
        assert settings is not None
        plan, graph = plan_and_graph(settings)
    speeds = [1 / SLOWER if worker == SLOW_WORKER else 1.0 for worker in range(STAGES)]
    paces = {REPLANNED: adapted}
    for case, known in ((KNEW, plan_for(plan, graph, speeds)), ("the plan as it was", plan)):
        with tempfile.TemporaryDirectory() as name:
            save_plan(known, Path(name) / "plan.json")
            _slow_down(Path(name))
            known_job = _job(Path(name), {"plan": str(Path(name) / "plan.json")}, 2 * TIMED)
            paces[case] = trained(known_job, [], QUIET_STEPS)[1]
    changes = [line.event for line in adapted if isinstance(line.event, Changed)]
    return [
        {
            "case": f"a worker {SLOWER:g} times slower: {case}",
            "model": "timed layers",
            "workers": STAGES,
            "then": STAGES,
            "changes": len(changes) if case == REPLANNED else 0,
            "step_s": round(_pace_s(recorded), 4),
            "why": "; then ".join(change.why for change in changes) if case == REPLANNED else "",
        }
        for case, recorded in paces.items()
    ]


def _pace_s(recorded: Sequence[Recorded]) -> float:
    """What one of the last steps of a run took."""
    seconds = [line.event.seconds for line in recorded if isinstance(line.event, Step)]
    return statistics.median(seconds[-TIMED:])


def run() -> Found:
    """A pipeline that loses a worker, and one in which a worker becomes slower, several times."""
    runs = [[lost_row(), *slow_rows()] for _ in range(REPEATS)]
    rows = of_repeats(list(itertools.chain(*runs)), ["case"], ["stall_s", "apart", "step_s"])
    killed = f"a pipeline of {STAGES} stages: from kill -9 of a worker to the next step, s"
    speed = f"throughput after a worker became {SLOWER:g} times slower, against a plan that knew of it"
    difference = "the largest difference of a step's loss from the run that lost nobody (float64)"
    return rows, [
        of_runs(at_most, killed, [number(each[0], "stall_s") for each in runs], LOST_GOAL_S),
        of_runs(at_most, difference, [_apart(each[0]) for each in runs], LOSS_GOAL, ", over all steps"),
        of_runs(at_least, speed, [_share(each[1:]) for each in runs], SPEED_GOAL),
    ]


def _apart(lost: Row) -> float | None:
    return None if lost["apart"] is None else number(lost, "apart")


def _share(slow: Sequence[Row]) -> float:
    """The pace of the plan that knew, over that of the run that was re-planned."""
    paces = {str(row["case"]).partition(": ")[2]: number(row, "step_s") for row in slow}
    return paces[KNEW] / paces[REPLANNED]
