"""What monitoring costs: steps of one run with and without it, in turn.

Every step of a kind is followed by one of the next kind, and the order turns from round to round, so that
whatever else the machine does meets all of them alike. Processor seconds are those of all workers, with their
threads. On a machine that others use, steps differ by more than monitoring costs, so its passes over the
gradients are also timed by themselves, from cold memory: more than that it cannot cost.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from plait.adapt.monitors.squared_norms import squared_norm
from plait.comm.collectives import all_gather_values
from plait.data.loader import Batch
from plait.data.sampler import Position
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import components
from plait.training.engines.train_step import TrainStep
from plait.training.monitoring.step_monitor import StepMonitor
from plait.training.run import Run
from plait.training.worker_group import group_of_world
from plait_bench.harness import Bench, BenchClaim, Row, at_most, ends_of, in_turns, in_world, number, spread
from plait_bench.pictures import bars, picture

# Both come from the same norms, so both together cost what each does.
KINDS = ("none", "noise-scale and variance")
GOAL = 0.01
# Samples of each worker in a step.
SHARE = 16
IMAGES = {"shape": [3, 64, 64], "samples": 256, "classes": 10}
TOKENS = {"shape": [64], "vocabulary": 1000, "samples": 256}
MODELS = {
    "ResNet-50, 64x64 images": (ModelSettings("plait.workloads.resnet:resnet50", {"classes": 10}), IMAGES),
    "transformer, 64 tokens": (
        ModelSettings(
            "plait.workloads.transformer:transformer",
            {"vocabulary": 1000, "context": 64, "layers": 6, "width": 256, "heads": 4},
        ),
        TOKENS,
    ),
}


def run(quick: bool = False, command: str = "plait bench monitoring") -> Bench:
    """Each model on 2 and on 4 workers; `quick` takes fewer steps, on 2 workers."""
    rows: list[Row] = []
    for workers in (2,) if quick else (2, 4):
        for model in MODELS:
            asked = {"model": model, "rounds": 6 if quick else 32}
            rows += in_world(workers, time_steps, asked)[0]
    return Bench("monitoring", command, rows, [_claim(row) for row in rows if row["monitor"] != "none"])


def _claim(row: Row) -> BenchClaim:
    words = f"{row['model']}, {row['workers']} workers: {row['monitor']}, processor time at every step"
    column = "processor_overhead"
    return at_most(words, number(row, column), GOAL, ends=ends_of(row, column))


def _settings(model: str, batch_size: int) -> TrainSettings:
    factory, options = MODELS[model]
    return TrainSettings(
        name="monitoring",
        model=factory,
        data=DataSettings("synthetic", batch_size, options),
        optimizer=OptimizerSettings("sgd", {"lr": 1e-3, "momentum": 0.9}),
        steps=1,
        device="cpu",
        checkpoint=CheckpointSettings(every_steps=10**9),
        monitor=("noise-scale",),
    )


def time_steps(worker: Worker, model: str, rounds: int) -> list[Row]:
    """Be one of the workers; the first one tells."""
    settings = _settings(model, SHARE * worker.world_size)
    parts = components.build(settings, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        run_ = Run(worker, settings, parts, RunDir(Path(folder)))
        step = TrainStep(parts, settings, group_of_world(worker))
        monitor = StepMonitor(worker, run_.trials, parts, run_.metrics.warn, shared=True)
        taken = _of_all(_take_steps(step, monitor, _batch(run_), rounds))
        run_.metrics.end(0, "finished", {}, None)
    step.close()
    return _rows(model, worker.world_size, taken, _passes_s(parts, worker.world_size, rounds))


def _passes_s(parts: components.Components, workers: int, rounds: int) -> float:
    """The seconds of what monitoring computes in a step: its passes over the gradients.

    One over a worker's own gradient, and one over its share of the sum.
    """
    gradients = [torch.randn_like(parameter) for parameter in parts.model.parameters()]
    taken = []
    for _ in range(rounds + 1):
        all_gather_values(None)
        started = time.perf_counter()
        squared_norm(gradients)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:]) * (1 + 1 / workers)


def _batch(run: Run) -> Batch:
    content = run.components.train_set.batch(0, list(range(SHARE)), 0)
    return Batch(content, SHARE, run.batch_size, 0, Position())


def _take_steps(
    step: TrainStep, monitor: StepMonitor, batch: Batch, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each kind's steps."""

    def timed(kind: str) -> Callable[[bool], tuple[float, float]]:
        def take(_: bool) -> tuple[float, float]:
            step.watch(None if kind == "none" else monitor)
            started = time.perf_counter(), time.process_time()
            monitor.step += 1
            step.step([batch], [1.0])
            return time.perf_counter() - started[0], time.process_time() - started[1]

        return take

    return in_turns({kind: timed(kind) for kind in KINDS}, rounds)


def _of_all(own: dict[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    """Each step by the wall seconds of this worker and the processor seconds of all of them."""
    everyone = all_gather_values({kind: [busy for _, busy in steps] for kind, steps in own.items()})
    return {
        kind: [(wall, sum(each[kind][i] for each in everyone)) for i, (wall, _) in enumerate(steps)]
        for kind, steps in own.items()
    }


def _rows(
    model: str, workers: int, taken: dict[str, list[tuple[float, float]]], passes_s: float
) -> list[Row]:
    rows: list[Row] = []
    for kind in KINDS:
        wall, busy = ([each[i] for each in taken[kind]] for i in (0, 1))
        rows.append(
            {
                "model": model,
                "workers": workers,
                "monitor": kind,
                **spread(wall, "step_s"),
                "processor_s": statistics.median(busy),
                "overhead": overhead_of(taken, kind, 0),
                **spread(overheads_of(taken, kind, 1), "processor_overhead"),
                "passes": 0.0 if kind == "none" else passes_s / statistics.median(wall),
                "rounds": len(wall),
            }
        )
    return rows


def overhead_of(taken: dict[str, list[tuple[float, float]]], kind: str, which: int) -> float:
    """The median of what a step took more than the plain one of its round, over the plain median."""
    return statistics.median(overheads_of(taken, kind, which))


def overheads_of(taken: dict[str, list[tuple[float, float]]], kind: str, which: int) -> list[float]:
    """What a step took more than the plain one of its round, over the plain median, in all rounds.

    Two rounds count as one: whichever kind came first in the one comes last in the other.
    """
    plain, own = ([each[which] for each in taken[name]] for name in ("none", kind))
    more = [a - b for a, b in zip(own, plain)]
    pairs = [(first + second) / 2 for first, second in zip(more[::2], more[1::2])]
    return [each / statistics.median(plain) for each in pairs or more]


def write_plot(bench: Bench, path: Path) -> None:
    """What monitoring adds to a step, by model and number of workers: its processor time and its passes."""
    columns = {"processor time": "processor_overhead", "its passes by themselves": "passes"}
    own: list[Row] = [
        {
            **row,
            "side": side,
            **{
                f"percent{end}": 100 * number(row, name + end)
                for end in ("", "_min", "_max")
                if name + end in row
            },
        }
        for row in bench.rows
        if row["monitor"] != "none"
        for side, name in columns.items()
    ]
    with picture(bench, path, (8, 4)) as (axis,):
        bars(axis, own, lambda row: f"{row['model']}\n{row['workers']} workers", "side", "percent")
        axis.axhline(100 * GOAL, color="grey", linewidth=0.8, label="goal")
        axis.set_ylabel("more than a plain step, %")
        axis.legend(fontsize=8)
