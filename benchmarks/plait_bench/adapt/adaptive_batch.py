"""Adaptive batch size: a residual network on real images with small, growing and large batches.

All three train for the same epochs, with the learning rate of the small batch; the growing batch's follows by
AdaScale. Training time counts, without evaluations.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from plait.core import events
from plait.core.run_events import Changed, Evaluated, Step
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.settings import (
    DataSettings,
    EvaluateSettings,
    LrScheduleSettings,
    ModelSettings,
    OptimizerSettings,
    PolicySettings,
    TrainSettings,
)
from plait_bench.adapt.same_workers import train_on_same_workers
from plait_bench.harness import Bench, BenchClaim, Row, at_most, in_world, number, of_runs, say
from plait_bench.pictures import picture

WORKERS = 2
SMALL, LARGE = 32, 256
RUNS = ("small", "adaptive", "large")
# Points of accuracy that the adaptive run may lose, and the share of the small batch's time that it may take.
POINTS, SHARE = 0.01, 0.7
POLICY = PolicySettings("batch-size", {"most": LARGE, "every_steps": 30, "lr": "adascale", "threshold": 0.5})


def run(quick: bool = False, command: str = "plait bench adaptive-batch") -> Bench:
    """Three seeds; `quick` takes two, fewer epochs and a smaller model."""
    asked = {"epochs": 6 if quick else 20, "seeds": [0, 1] if quick else [0, 1, 2], "quick": quick}
    rows = in_world(WORKERS, train_all, asked, joined=False)[0]
    return Bench("adaptive-batch", command, rows, claims_of(rows))


def _settings(kind: str, epochs: int, seed: int, quick: bool) -> TrainSettings:
    model = "resnet56_tiny" if quick else "resnet56"
    return TrainSettings(
        name="adaptive-batch",
        model=ModelSettings(f"plait.workloads.resnet:{model}", {"classes": 10, "channels": 1}),
        data=DataSettings("digits", LARGE if kind == "large" else SMALL),
        optimizer=OptimizerSettings("sgd", {"lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4}),
        lr_schedule=LrScheduleSettings("cosine"),
        epochs=epochs,
        seed=seed,
        evaluate=EvaluateSettings(batch_size=512),
        log_every_steps=1,
        adapt=(POLICY,) if kind == "adaptive" else (),
    )


def train_all(worker: Worker, epochs: int, seeds: list[int], quick: bool) -> list[Row]:
    """Be one of the workers of all runs; the first one tells what each came to."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        # Runs of a seed take turns, so that what else the machine does meets all of them.
        for seed, kind in itertools.product(seeds, RUNS):
            name = f"{kind}-{seed}"
            train_on_same_workers(worker, name, _settings(kind, epochs, seed, quick), Path(folder) / name)
            if worker.rank == 0:
                say(f"adaptive-batch, {kind} batches, seed {seed}")
                rows.append(_row(kind, seed, RunDir(Path(folder) / name)))
    return rows


def _row(kind: str, seed: int, run: RunDir) -> Row:
    log = [recorded.event for recorded in events.read(run.events())]
    steps = [event for event in log if isinstance(event, Step)]
    changes = [event.change for event in log if isinstance(event, Changed)]
    sizes = [SMALL if kind != "large" else LARGE, *(int(change["batch_size"]) for change in changes)]
    (metrics,) = (event.metrics for event in log if isinstance(event, Evaluated))
    return {
        "batches": kind,
        "seed": seed,
        "accuracy": metrics["accuracy"],
        "test_loss": metrics["loss"],
        "seconds": sum(step.seconds for step in steps),
        "steps": steps[-1].step,
        "sizes": "-".join(str(size) for size in dict.fromkeys(sizes)),
        "last_lr_factor": float(changes[-1]["lr_factor"]) if changes else 1.0,
    }


def claims_of(rows: Sequence[Row]) -> list[BenchClaim]:
    """The two kinds of batches are compared seed by seed."""

    def of_seeds(kind: str, column: str) -> list[float]:
        return [number(row, column) for row in rows if row["batches"] == kind]

    pairs = zip(of_seeds("small", "accuracy"), of_seeds("adaptive", "accuracy"))
    lost = [small - adaptive for small, adaptive in pairs]
    seconds = zip(of_seeds("adaptive", "seconds"), of_seeds("small", "seconds"))
    shares = [adaptive_s / small_s for adaptive_s, small_s in seconds]
    return [
        of_runs(at_most, "accuracy that small batches have more", lost, POINTS),
        of_runs(at_most, "its time over that of small batches", shares, SHARE),
    ]


def write_plot(bench: Bench, path: Path) -> None:
    """Accuracy over training time, a point for each run."""
    with picture(bench, path, (7, 4)) as (axis,):
        for kind in RUNS:
            own = [row for row in bench.rows if row["batches"] == kind]
            seconds, accuracy = ([number(row, key) for row in own] for key in ("seconds", "accuracy"))
            axis.scatter(seconds, accuracy, label=f"{kind} ({own[0]['sizes']})")
        axis.set(xlabel="seconds of training", ylabel="test accuracy")
        axis.set_xlim(left=0)
        axis.legend(fontsize=8)
