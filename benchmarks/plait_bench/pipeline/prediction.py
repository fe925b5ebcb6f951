"""Predictions: what an `auto` plan says of a step's time, against the run.

A job is profiled, planned and trained on two workers, one thread each, as `plait train` does. Times are of
the steady state: microbatches that came back through the first stage in the middle half of the run.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.core.run_events import Operations
from plait.launcher.display import Silent
from plait.launcher.run import launch
from plait.launcher.run_dir import RunDir
from plait.measure.auto_plan import planned
from plait.planner import Plan
from plait.schema.settings import DataSettings, ModelSettings, OptimizerSettings, PlanRequest, TrainSettings
from plait_bench.harness import BenchClaim, Found, Row, recorded, spread, within, workers

TWO = workers(2)
_SGD = OptimizerSettings("sgd", {"lr": 0.01, "momentum": 0.9})


def run(repeats: int = 3, steps: int = 20) -> Found:
    """Step times of three tiny models, each `repeats` times."""
    rows = [_time_row(settings, repeats) for settings in time_jobs(steps)]
    return rows, claims_of(rows)


def claims_of(rows: Sequence[Row]) -> list[BenchClaim]:
    """Within 15% either way, the worst of all runs."""
    claims = []
    for row in rows:
        ratios = [float(row[key] or math.inf) for key in ("ratio_min", "ratio_max")]
        off = max((100 * (ratio - 1) for ratio in ratios), key=abs)
        words = f"{row['case']}: step time, percent measured over predicted, the worst run"
        claims.append(within(words, off, 15))
    return claims


def time_jobs(steps: int) -> tuple[TrainSettings, ...]:
    """VGG-16 and ResNet-50, tiny, on digits, and a small transformer."""
    transformer = {"vocabulary": 256, "context": 64, "layers": 4, "heads": 4, "width": 128}
    tokens = {"shape": [64], "vocabulary": 256, "samples": 1024}
    common: dict[str, Any] = {"optimizer": _SGD, "steps": steps, "device": "cpu"}
    args = {**transformer, "dropout": 0.0, "tied": False}
    images = DataSettings("digits", 256)
    vgg16, resnet50 = "plait.workloads.vgg:vgg16_tiny", "plait.workloads.resnet:resnet50_tiny"
    return (
        TrainSettings("vgg16_tiny", ModelSettings(vgg16), images, **common),
        TrainSettings("resnet50_tiny", ModelSettings(resnet50), images, **common),
        TrainSettings(
            "transformer",
            ModelSettings("plait.workloads.transformer:transformer", args),
            DataSettings("synthetic", 32, tokens),
            **common,
        ),
    )


def _time_row(settings: TrainSettings, repeats: int) -> Row:
    predicted, measured, ratios = [], [], []
    plan = None
    for _ in range(repeats):
        chosen, plan = planned(settings, TWO, PlanRequest("auto"))
        operations = _train(chosen)
        predicted.append(plan.step_s)
        measured.append(step_s(plan, operations))
        ratios.append(measured[-1] / predicted[-1])
    assert plan is not None
    return {
        "case": settings.name,
        "plan": "-".join(str(stage.replicas) for stage in plan.stages),
        "schedule": plan.schedule.value,
        "microbatches": plan.microbatches,
        "predicted_step_s": statistics.median(predicted),
        "step_s": statistics.median(measured),
        **spread(ratios, "ratio"),
        "repeats": repeats,
    }


def step_s(plan: Plan, operations: Sequence[Operations]) -> float:
    """Seconds a step in the middle half of a run, by when microbatches came back to the first stage."""
    ends = sorted(
        end
        for event in operations
        for letter, stage, end in zip(event.letters, event.stages, event.ends)
        if letter in "BI" and stage == 0
    )
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (ends[last] - ends[first]) / (last - first) * plan.microbatches


def _train(settings: TrainSettings) -> list[Operations]:
    """What all workers of a run did."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunDir(Path(temporary) / "run")
        launch(settings, TWO, folder, Silent())
        return [line.event for line in recorded(folder) if isinstance(line.event, Operations)]
