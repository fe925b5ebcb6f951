"""Time to a target loss under each sync: real runs of real data, evaluated on the averaged model.

Steps sleep besides what they compute, so that eight workers need no eight processors. The clock is the run's
own: from its start to the evaluation at the target, evaluations themselves left out; where the target lies
between two evaluations, so does the time. All runs share one world of workers, and each ends at its target.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from plait.core import run_events
from plait.core.events import read
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.settings import (
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
)
from plait.schema.topology_spec import TopologySpec
from plait.workloads.lstm import lstm_tiny
from plait.workloads.mlp import mlp_tiny
from plait_bench.adapt.same_workers import train_on_same_workers
from plait_bench.harness import BenchClaim, Found, Row, at_least, english, in_world, spread
from plait_bench.sleeping import Sleeping
from plait_bench.sync import speed

WORKERS = 8
STEP_S = 0.05
EVERY = 20
SEEDS = (0, 1, 2)
# As in speed; stumbles are as long against a step as there.
CASES = {
    **{name: case for name, case in speed.CASES.items() if case.jitter is None},
    "jitter 0.1:1": SlowSettings(jitter=(0.1, STEP_S)),
    "jitter 0.1:5": SlowSettings(jitter=(0.1, 5 * STEP_S)),
}
SYNCS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "partial-reduce": {},
    "ad-psgd": {},
    "local-sgd": {"every": 8},
}
TARGETS = {"digits": 0.30, "text": 2.9}
GOALS = {"homogeneous": 0.9, "one worker x4": 3.0}


def sleeping_mlp() -> nn.Module:
    """A small MLP for digits."""
    return Sleeping(mlp_tiny(), STEP_S)


def sleeping_lstm() -> nn.Module:
    """A small LSTM over bytes."""
    return Sleeping(lstm_tiny(), STEP_S)


def run() -> Found:
    """Time to a target loss on digits and on text, three seeds, with slow workers and without.

    A row for each model, case and sync: median, least and most seconds over the seeds.
    """
    # Syncs take turns, so that what else the machine does meets all of them.
    runs = [[m, case, sync, seed] for m in TARGETS for case in CASES for seed in SEEDS for sync in SYNCS]
    found = in_world(WORKERS, train_all, {"runs": runs}, joined=False)[0]
    rows = [
        _row(*asked, [f for run, f in zip(runs, found) if run[:3] == list(asked)])
        for asked in itertools.product(TARGETS, CASES, SYNCS)
    ]
    return rows, convergence_claims(rows)


def train_all(worker: Worker, runs: list[list[Any]]) -> list[tuple[float | None, float]]:
    """Be one of the workers of all runs; the first one returns what each came to."""
    return [_time_to_target(worker, f"run/{number}", *run) for number, run in enumerate(runs)]


def _row(model: str, case: str, sync: str, found: Sequence[tuple[float | None, float]]) -> Row:
    seconds = [s for s, _ in found if s is not None]
    reached = len(seconds) == len(found)
    return {
        "case": case,
        "model": model,
        "sync": sync,
        "target_loss": TARGETS[model],
        **(spread(seconds, "seconds_to_target") if reached else {"seconds_to_target": None}),
        "final_loss": statistics.median(loss for _, loss in found),
        "seeds": len(found),
    }


def _settings(model: str, case: str, sync: str, seed: int) -> TrainSettings:
    if model == "digits":
        factory, data = "sleeping_mlp", DataSettings("digits", 128)
        optimizer, steps = OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9}), 120
    else:
        options = {"path": str(english()), "level": "byte", "length": 32}
        factory, data = "sleeping_lstm", DataSettings("text", 128, options)
        optimizer, steps = OptimizerSettings("adam", {"lr": 0.01}), 160
    return TrainSettings(
        name="convergence",
        model=ModelSettings(f"{__name__}:{factory}"),
        data=data,
        optimizer=optimizer,
        steps=steps,
        seed=seed,
        evaluate=EvaluateSettings(every_steps=EVERY, batch_size=1024),
        # Over the backend's own way, eight workers on few cores would wait for wake-ups.
        topology=TopologySpec("star"),
        sync=SyncSettings(sync, SYNCS[sync]),
        slow=CASES[case],
    )


def _time_to_target(
    worker: Worker, name: str, model: str, case: str, sync: str, seed: int
) -> tuple[float | None, float]:
    """Seconds of training until the target was reached, None where it was not; and the last loss."""
    with tempfile.TemporaryDirectory() as path:
        train_on_same_workers(worker, name, _settings(model, case, sync, seed), Path(path), TARGETS[model])
        return seconds_to(RunDir(Path(path)).events(), TARGETS[model]) if worker.rank == 0 else (None, 0.0)


def seconds_to(path: Path, target: float) -> tuple[float | None, float]:
    """Seconds from a run's start until its test loss was `target`, and the loss of the last evaluation."""
    started, evaluating, before = 0.0, 0.0, (0.0, float("nan"))
    for recorded in read(path):
        if isinstance(recorded.event, run_events.RunStarted):
            started = recorded.t
        elif isinstance(recorded.event, run_events.Evaluated):
            evaluating += recorded.event.seconds
            found = recorded.event.metrics["loss"]
            now = (recorded.t - started - evaluating, float("nan") if found is None else found)
            if now[1] <= target:
                return _between(before, now, target), now[1]
            before = now
    return None, before[1]


def _between(before: tuple[float, float], now: tuple[float, float], target: float) -> float:
    """When a loss that fell in a straight line between two evaluations was at the target."""
    if not before[1] > target:
        return now[0]
    return before[0] + (now[0] - before[0]) * (before[1] - target) / (before[1] - now[1])


def convergence_claims(rows: Sequence[Row]) -> list[BenchClaim]:
    """Partial reduce against all-reduce: much faster with a slow worker, hardly slower without."""
    found = {(r["model"], r["case"], r["sync"]): r["seconds_to_target"] for r in rows}
    claims = []
    for model, case in dict.fromkeys((r["model"], str(r["case"])) for r in rows if r["case"] in GOALS):
        one, other = found.get((model, case, "all-reduce")), found.get((model, case, "partial-reduce"))
        value = float(one) / float(other) if one and other else None
        words = f"{model}, {case}: partial reduce's speed to the target loss over all-reduce's"
        claims.append(at_least(words, value, GOALS[case]))
    return claims
