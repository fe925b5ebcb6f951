"""Pipelines that change while they run: one loses a worker, in the other a worker becomes slower."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.core import events
from plait.core.run_events import Changed, Step, WorkersChanged
from plait.launch.display import WorkerState
from plait.launch.run_dir import RunDir
from plait.measure.auto_plan import settings_before
from plait.planner import save_plan
from plait.planner.replan import plan_for
from plait.training.change.replanning import plan_and_graph
from plait_bench.adapt.driver import Driver, KillWorker
from plait_bench.harness import BenchClaim, Row

NAME = "pipelines"
STAGES, LAYERS, BATCH, PIECES = 4, 12, 32, 8
# What a layer takes for a microbatch, forward and backward, whatever the machine.
FORWARD_S, BACKWARD_S = 0.001, 0.002
SLOW_WORKER, SLOWER = 2, 3.0
LOST_GOAL_S, LOSS_GOAL, SPEED_GOAL = 10.0, 1e-9, 0.85
QUIET_STEPS = 30
# Steps whose median is a run's pace.
TIMED = 20


class TimedLayers(nn.Sequential):
    """Layers that take a known time; one worker's take longer once `slow_file` is there."""

    def __init__(self, slow_file: str) -> None:
        layers = [TimedLayer(slow_file) for _ in range(LAYERS)]
        super().__init__(nn.Flatten(), *layers, nn.Linear(64, 10))


class TimedLayer(nn.Module):
    """A linear layer that takes a known time besides."""

    def __init__(self, slow_file: str) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self._slow_file = slow_file

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Timed.apply(torch.relu(self.linear(x)), self._slow_file)  # type: ignore[no-untyped-call]
        return found


class _Timed(torch.autograd.Function):
    """Waits in forward and in backward, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slow_file: str) -> Tensor:
        ctx.slow_file = slow_file
        _wait(FORWARD_S, slow_file)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _wait(BACKWARD_S, ctx.slow_file)
        return gradient, None


def _wait(seconds: float, slow_file: str) -> None:
    is_slow = dist.is_initialized() and dist.get_rank() == SLOW_WORKER and os.path.exists(slow_file)
    time.sleep(seconds * (SLOWER if is_slow else 1.0))


def _job(folder: Path, parallel: Mapping[str, Any], steps: int, **more: Any) -> dict[str, Any]:
    return {
        "name": NAME,
        "model": f"{__name__}:TimedLayers",
        "model_args": {"slow_file": str(folder / "slow")},
        "data": {"kind": "digits", "batch_size": BATCH},
        "optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9},
        "steps": steps,
        "precision": "float64",
        "device": "cpu",
        "log_every_steps": 1,
        "checkpoint": {"every_steps": 20},
        "parallel": {
            "workers": STAGES,
            "threads": 1,
            "plan": "model-parallel",
            "schedule": "flush",
            "microbatches": PIECES,
            **parallel,
        },
        "run_dir": str(folder),
        **more,
    }


def _trained(job: Mapping[str, Any], acts: Sequence[Callable[..., None]] = ()) -> tuple[RunDir, list[Any]]:
    """The folder of a run, and its record in the order of time."""
    from plait.jobs.train import train  # reads job files

    driver = Driver(NAME, acts, Path(job["run_dir"]), QUIET_STEPS)
    folder = RunDir(Path(train(job, display=driver).run))
    files = sorted(folder.path.glob("events/*.jsonl"))
    found = [line for path in files for line in events.read(path)]
    return folder, sorted(found, key=lambda line: line.t)


def _losses(recorded: Sequence[events.Recorded]) -> dict[int, float]:
    """The loss of each step, as it was last taken."""
    found = {line.event.step: line.event.loss for line in recorded if isinstance(line.event, Step)}
    return {step: float("nan") if loss is None else loss for step, loss in found.items()}


def lost_rows() -> list[Row]:
    """A pipeline of four stages that loses a worker, beside one that does not."""
    steps = 2 * QUIET_STEPS + 20
    with tempfile.TemporaryDirectory() as name:
        kill = KillWorker(SLOW_WORKER)
        _, lost = _trained(_job(Path(name), {"elastic": True}, steps), [kill])
    with tempfile.TemporaryDirectory() as name:
        _, fixed = _trained(_job(Path(name), {}, steps))
    change = next(line for line in lost if isinstance(line.event, WorkersChanged))
    after = next(line for line in lost if isinstance(line.event, Step) and line.t > change.t)
    ours, theirs = _losses(lost), _losses(fixed)
    apart = max(abs(ours[step] - theirs[step]) for step in theirs) if ours.keys() == theirs.keys() else None
    assert kill.at is not None
    return [
        {
            "case": "a pipeline loses a worker",
            "model": "timed layers",
            "workers": STAGES,
            "then": len(change.event.members),
            "step": change.event.step,
            "stall_s": round(after.t - kill.at, 3),
            "apart": apart,
        }
    ]


def slow_rows(steps: int = 150) -> list[Row]:
    """The pace of a pipeline in which a worker becomes slower, and of one whose plan knew of it."""

    def slow(folder: RunDir, _: tuple[WorkerState, ...]) -> None:
        (folder.path.parent / "slow").touch()

    policy = {"kind": "plan"}
    with tempfile.TemporaryDirectory() as name:
        folder, adapted = _trained(_job(Path(name), {}, steps, adapt=[policy]), [slow])
        settings = settings_before(folder.settings)
        assert settings is not None
        plan, graph = plan_and_graph(settings)
    speeds = [1 / SLOWER if worker == SLOW_WORKER else 1.0 for worker in range(STAGES)]
    paces = {"re-planned": adapted}
    for case, known in (("a plan that knew", plan_for(plan, graph, speeds)), ("the plan as it was", plan)):
        with tempfile.TemporaryDirectory() as name:
            save_plan(known, Path(name) / "plan.json")
            (Path(name) / "slow").touch()
            job = _job(Path(name), {"plan": str(Path(name) / "plan.json")}, 2 * TIMED)
            paces[case] = _trained(job)[1]
    changes = [line.event for line in adapted if isinstance(line.event, Changed)]
    return [
        {
            "case": f"a worker {SLOWER:g} times slower: {case}",
            "model": "timed layers",
            "workers": STAGES,
            "then": STAGES,
            "step": changes[0].step if changes and case == "re-planned" else None,
            "changes": len(changes) if case == "re-planned" else 0,
            "step_s": round(_pace_s(recorded), 4),
            "why": "; then ".join(change.why for change in changes) if case == "re-planned" else "",
        }
        for case, recorded in paces.items()
    ]


def _pace_s(recorded: Sequence[events.Recorded]) -> float:
    """What one of the last steps of a run took."""
    seconds = [line.event.seconds for line in recorded if isinstance(line.event, Step)]
    return statistics.median(seconds[-TIMED:])


def claims(rows: Sequence[Row]) -> list[BenchClaim]:
    """What the rows show of a lost and of a slow worker of a pipeline."""
    found = []
    for row in rows:
        if row["case"] == "a pipeline loses a worker":
            seconds = float(row["stall_s"] or 0.0)
            apart = None if row["apart"] is None else float(row["apart"])
            found.append(
                BenchClaim(
                    f"a pipeline of {STAGES} stages: from kill -9 of a worker to the next step, s",
                    seconds,
                    f"at most {LOST_GOAL_S:g}",
                    seconds <= LOST_GOAL_S,
                )
            )
            words = "the largest difference of a step's loss from the run that lost nobody (float64)"
            holds = apart is not None and apart <= LOSS_GOAL
            found.append(BenchClaim(words, apart, f"at most {LOSS_GOAL:g}, over all steps", holds))
    timed = [row for row in rows if "step_s" in row]
    paces = {str(row["case"]).partition(": ")[2]: float(row["step_s"] or 0.0) for row in timed}
    if "re-planned" in paces and "a plan that knew" in paces:
        share = paces["a plan that knew"] / paces["re-planned"]
        words = f"throughput after a worker became {SLOWER:g} times slower, against a plan that knew of it"
        found.append(BenchClaim(words, round(share, 3), f"at least {SPEED_GOAL:g}", share >= SPEED_GOAL))
    return found
