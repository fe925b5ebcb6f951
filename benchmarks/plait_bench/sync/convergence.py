"""Time to a target loss under each sync: real runs of real data, evaluated on the averaged model.

Steps sleep besides what they compute, so that eight workers need no eight processors. The clock is the run's
own: from its start to the evaluation at the target, evaluations themselves left out; where the target lies
between two evaluations, so does the time. All runs share one world of workers, and each ends at its target.
"""

from __future__ import annotations

import pydoc_data.topics
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.comm.groups import join_world
from plait.comm.rendezvous import Rendezvous
from plait.core import run_events
from plait.core.events import read
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
)
from plait.schema.topology_spec import TopologySpec
from plait.training import components
from plait.training.worker import make_loop
from plait.workloads.lstm import lstm_tiny
from plait.workloads.mlp import mlp_tiny
from plait_bench.harness import BenchClaim, Row
from plait_bench.world import in_world

WORKERS = 8
STEP_S = 0.05
EVERY = 20
# As the cases of sync_speed; stumbles are as long against a step as there.
CASES = {
    "homogeneous": SlowSettings(),
    "one worker x2": SlowSettings({1: 2.0}),
    "one worker x4": SlowSettings({1: 4.0}),
    "four workers x2": SlowSettings(dict.fromkeys((1, 3, 5, 7), 2.0)),
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


class Sleeping(nn.Module):
    """A model whose training steps take `seconds` longer."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__()
        self.model = model
        self._seconds = seconds

    def forward(self, x: Tensor) -> Any:
        if self.training:
            time.sleep(self._seconds)
        return self.model(x)


def sleeping_mlp(seconds: float = STEP_S) -> nn.Module:
    """A small MLP for digits."""
    return Sleeping(mlp_tiny(), seconds)


def sleeping_lstm(seconds: float = STEP_S) -> nn.Module:
    """A small LSTM over bytes."""
    return Sleeping(lstm_tiny(), seconds)


def convergence_rows(
    models: Sequence[str] = tuple(TARGETS),
    cases: Sequence[str] = tuple(CASES),
    syncs: Sequence[str] = tuple(SYNCS),
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Row]:
    """One row for each model, case and sync: median, least and most seconds over the seeds."""
    # Syncs take turns, so that what else the machine does meets all of them.
    runs = [[m, case, sync, seed] for m in models for case in cases for seed in seeds for sync in syncs]
    found = in_world(WORKERS, f"{__name__}:convergence_worker", {"runs": runs})["found"]
    rows: list[Row] = []
    for model in models:
        for case in cases:
            for sync in syncs:
                own = [f for run, f in zip(runs, found) if run[:3] == [model, case, sync]]
                rows.append(_row(model, case, sync, own))
    return rows


def convergence_worker(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    """Be one of the workers of all runs; the first one returns what each came to."""
    return {"found": [_time_to_target(worker, number, *run) for number, run in enumerate(asked["runs"])]}


class _Guest:
    """A worker as one of many runs sees it: with a store of its own, and done at the target."""

    def __init__(self, worker: Worker, number: int, target: float) -> None:
        self.rank, self.world_size, self.local_rank = worker.rank, worker.world_size, worker.local_rank
        self.id, self.memberships = worker.id, worker.memberships
        self.host, self.hosts, self.timeout_s = worker.host, worker.hosts, worker.timeout_s
        self._target = target
        self._reached = False
        self.store: dist.Store = dist.PrefixStore(f"bench/run/{number}", worker.store)
        secret = worker.rendezvous.secret
        self.rendezvous = Rendezvous(self.store, secret, self.rank, self.hosts, timeout_s=self.timeout_s)
        self.join("gloo")

    def stop_requested(self) -> bool:
        return self._reached

    def ask_to_stop(self) -> None:
        self._reached = True

    def tolerate_losses(self) -> None:
        """The job is all runs, and needs all workers."""

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Nobody is lost unless the whole job fails."""

    def join(self, backend: str) -> None:
        join_world(backend, self.rendezvous)

    def report(self, progress: dict[str, Any]) -> None:
        """Take note of progress; only the first worker reports, and its stop ends the run for all."""
        loss = progress.get("test_loss")
        self._reached = self._reached or (loss is not None and loss <= self._target)


def _row(model: str, case: str, sync: str, found: Sequence[tuple[float | None, float]]) -> Row:
    seconds = [s for s, _ in found if s is not None]
    reached = len(seconds) == len(found)
    return {
        "case": case,
        "model": model,
        "sync": sync,
        "target_loss": TARGETS[model],
        "seconds_to_target": statistics.median(seconds) if reached else None,
        "least_s": min(seconds) if reached else None,
        "most_s": max(seconds) if reached else None,
        "final_loss": statistics.median(loss for _, loss in found),
        "seeds": len(found),
    }


def _settings(model: str, case: str, sync: str, seed: int) -> TrainSettings:
    if model == "digits":
        factory, data = "sleeping_mlp", DataSettings("digits", 128)
        optimizer, steps = OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9}), 120
    else:
        path = str(Path(pydoc_data.topics.__file__))
        options = {"path": path, "level": "byte", "length": 32}
        factory, data = "sleeping_lstm", DataSettings("text", 128, options)
        optimizer, steps = OptimizerSettings("adam", {"lr": 0.01}), 160
    return TrainSettings(
        name="convergence",
        model=ModelSettings(f"plait_bench.sync.convergence:{factory}"),
        data=data,
        optimizer=optimizer,
        steps=steps,
        seed=seed,
        device="cpu",
        evaluate=EvaluateSettings(every_steps=EVERY, batch_size=1024),
        checkpoint=CheckpointSettings(every_steps=10_000),
        # Over the backend's own way, eight workers on few cores would wait for wake-ups.
        topology=TopologySpec("star"),
        sync=SyncSettings(sync, SYNCS[sync]),
        slow=CASES[case],
    )


def _time_to_target(
    worker: Worker, number: int, model: str, case: str, sync: str, seed: int
) -> tuple[float | None, float]:
    """Seconds of training until the target was reached, None where it was not; and the last loss."""
    settings = _settings(model, case, sync, seed)
    guest = _Guest(worker, number, TARGETS[model])
    with tempfile.TemporaryDirectory() as path:
        folder = RunDir(Path(path))
        parts = components.build(settings, torch.device("cpu"))
        make_loop(guest, settings, parts, folder).train(resume=False)
        if dist.is_initialized():
            dist.destroy_process_group()
        worker.store.set(f"bench/done/{number}/{worker.rank}", "")
        # The first worker holds the store of the run, which the others use to their end.
        worker.store.wait([f"bench/done/{number}/{rank}" for rank in range(worker.world_size)])
        return seconds_to(folder.events(), TARGETS[model]) if worker.rank == 0 else (None, 0.0)


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
        goal = GOALS[case]
        words = f"{model}, {case}: partial reduce's speed to the target loss over all-reduce's"
        claims.append(BenchClaim(words, value, f"at least {goal:g}", value is not None and value >= goal))
    return claims
