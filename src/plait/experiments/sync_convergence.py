"""Time to a target loss under each sync: real runs of real data, evaluated on the averaged model.

Steps sleep besides what they compute, so that eight workers need no eight processors. The clock is the run's
own: from its start to the first evaluation at the target, evaluations themselves left out.
"""

from __future__ import annotations

import pydoc_data.topics
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from plait.cluster.hosts import LOCAL, Host
from plait.core.events import read
from plait.experiments.bench import Claim, Row
from plait.runtime import events
from plait.runtime.folder import RunFolder
from plait.runtime.launch import Placement, Silent, launch
from plait.runtime.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
)
from plait.sync.options import TOLERANT
from plait.workloads.lstm import lstm_tiny
from plait.workloads.mlp import mlp_tiny

WORKERS = 8
CASES = {
    "homogeneous": SlowSettings(),
    "one worker x4": SlowSettings({1: 4.0}),
}
SYNCS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "partial-reduce": {},
    "ad-psgd": {},
    "local-sgd": {"every": 8},
}
TARGETS = {"digits": 0.30, "text": 2.9}


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


def sleeping_mlp(seconds: float = 0.05) -> nn.Module:
    """A small MLP for digits."""
    return Sleeping(mlp_tiny(), seconds)


def sleeping_lstm(seconds: float = 0.05) -> nn.Module:
    """A small LSTM over bytes."""
    return Sleeping(lstm_tiny(), seconds)


def convergence_rows(
    models: Sequence[str] = tuple(TARGETS),
    cases: Sequence[str] = tuple(CASES),
    syncs: Sequence[str] = tuple(SYNCS),
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Row]:
    """One row for each model, case and sync: median, least and most seconds over the seeds."""
    rows: list[Row] = []
    for model in models:
        for case in cases:
            for sync in syncs:
                found = [_time_to_target(model, case, sync, seed) for seed in seeds]
                rows.append(_row(model, case, sync, found))
    return rows


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
        model=ModelSettings(f"plait.experiments.sync_convergence:{factory}"),
        data=data,
        optimizer=optimizer,
        steps=steps,
        seed=seed,
        device="cpu",
        evaluate=EvaluateSettings(every_steps=20, batch_size=1024),
        checkpoint=CheckpointSettings(every_steps=10_000),
        sync=SyncSettings(sync, SYNCS[sync]),
        slow=CASES[case],
    )


def _time_to_target(model: str, case: str, sync: str, seed: int) -> tuple[float | None, float]:
    """Seconds of training until the target was reached, None where it was not; and the last loss."""
    settings = _settings(model, case, sync, seed)
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(Path(path) / "run")
        placement = Placement((Host(LOCAL, WORKERS),), threads=1, tolerate_loss=sync in TOLERANT)
        launch(settings, placement, folder, Silent())
        return seconds_to(folder.events(), TARGETS[model])


def seconds_to(path: Path, target: float) -> tuple[float | None, float]:
    """Seconds from a run's start to the first evaluation at `target`, and the loss of the last one."""
    started, evaluating = 0.0, 0.0
    reached: float | None = None
    loss = float("nan")
    for recorded in read(path):
        if isinstance(recorded.event, events.RunStarted):
            started = recorded.t
        elif isinstance(recorded.event, events.Evaluated):
            evaluating += recorded.event.seconds
            found = recorded.event.metrics["loss"]
            loss = float("nan") if found is None else found
            if reached is None and loss <= target:
                reached = recorded.t - started - evaluating
    return reached, loss


def convergence_claims(rows: Sequence[Row]) -> list[Claim]:
    """Partial reduce against all-reduce: much faster with a slow worker, hardly slower without."""
    found = {(r["model"], r["case"], r["sync"]): r["seconds_to_target"] for r in rows}
    claims = []
    for model, case in dict.fromkeys((r["model"], r["case"]) for r in rows):
        one, other = found.get((model, case, "all-reduce")), found.get((model, case, "partial-reduce"))
        value = float(one) / float(other) if one and other else None
        goal = 0.9 if case == "homogeneous" else 3.0
        words = f"{model}, {case}: partial reduce's speed to the target loss over all-reduce's"
        claims.append(Claim(words, value, f"at least {goal:g}", value is not None and value >= goal))
    return claims
