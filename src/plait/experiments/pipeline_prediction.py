"""Predictions: what an `auto` plan says of a step's time and of each stage's memory, against the run.

A job is profiled, planned and trained on two workers, one thread each, as `plait train` does. Times are of
the steady state: microbatches that came back through the first stage in the middle half of the run.

Memory is what the kernel counts as resident in a worker while it trains, sampled every few milliseconds from
the first operation to the last update, with allocators that give back at once what is freed; less what the
same run of a model of next to no weight has resident, which is the libraries' own. The plan predicts weights
in all their versions, gradients, the optimizer's state, buffers, and activations in flight.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.cluster.hosts import LOCAL, Host
from plait.cluster.supervisor import Supervisor, Unwatched
from plait.cluster.worker import Worker
from plait.core.codec import encode
from plait.core.events import read
from plait.experiments.bench import Claim, Row
from plait.experiments.pipeline_models import job
from plait.planner import Plan
from plait.profiler.trace import trace
from plait.runtime.events import Operations
from plait.runtime.folder import RunFolder
from plait.runtime.launch import Placement
from plait.runtime.planned import PlanWish, planned
from plait.runtime.settings import DataSettings, ModelSettings, OptimizerSettings, TrainSettings
from plait.runtime.worker import train

# What is freed is no longer resident, at once: for builds of torch with mimalloc, and for the others.
_ALLOCATOR = {"MIMALLOC_PURGE_DELAY": "0", "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
TWO = Placement((Host(LOCAL, 2),), threads=1)
SAMPLE_S = 0.003
_SGD = OptimizerSettings("sgd", {"lr": 0.01, "momentum": 0.9})


def run(repeats: int = 3, steps: int = 20, memory_steps: int = 4) -> tuple[list[Row], list[Claim]]:
    """Step times of three tiny models, each `repeats` times, and memory of three larger ones."""
    rows = [_time_row(settings, repeats) for settings in time_jobs(steps)]
    light, _ = _watch(time_jobs(memory_steps)[0])
    for settings in memory_jobs(memory_steps):
        rows += _memory_rows(settings, max(light.values()))
    return rows, claims_of(rows)


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Within 15% either way."""
    claims = []
    for row in rows:
        off = 100 * (float(row["ratio"] or math.inf) - 1)
        what = "step time" if "step_s" in row else f"memory of stage {row['stage']}"
        words = f"{row['case']}: {what}, percent measured over predicted"
        claims.append(Claim(words, off, "at most 15 either way", abs(off) <= 15))
    return claims


def time_jobs(steps: int) -> tuple[TrainSettings, ...]:
    """VGG-16 and ResNet-50, tiny, on digits, and a small transformer."""
    transformer = {"vocabulary": 256, "context": 64, "layers": 4, "heads": 4, "width": 128}
    tokens = {"shape": [64], "vocabulary": 256, "samples": 1024}
    common: dict[str, Any] = {"optimizer": _SGD, "steps": steps, "device": "cpu"}
    return (
        TrainSettings(
            "vgg16_tiny",
            ModelSettings("plait.workloads.vgg:vgg16_tiny"),
            DataSettings("digits", 256),
            **common,
        ),
        TrainSettings(
            "resnet50_tiny",
            ModelSettings("plait.workloads.resnet:resnet50_tiny"),
            DataSettings("digits", 256),
            **common,
        ),
        TrainSettings(
            "transformer",
            ModelSettings(
                "plait.workloads.transformer:transformer", {**transformer, "dropout": 0.0, "tied": False}
            ),
            DataSettings("synthetic", 32, tokens),
            **common,
        ),
    )


def memory_jobs(steps: int) -> tuple[TrainSettings, ...]:
    """The comparison's models with batches that make activations weigh as much as weights do."""
    sizes = {"vgg16": 32, "lstm": 64, "transformer": 64}
    return tuple(replace(job(name, size), steps=steps) for name, size in sizes.items())


def _time_row(settings: TrainSettings, repeats: int) -> Row:
    predicted, measured, ratios = [], [], []
    plan = None
    for _ in range(repeats):
        chosen, plan = planned(settings, TWO, PlanWish("auto"))
        spans, _ = _train(chosen, TWO, watched=False)
        predicted.append(plan.step_s)
        measured.append(step_s(plan, spans))
        ratios.append(measured[-1] / predicted[-1])
    assert plan is not None
    return {
        "case": settings.name,
        "plan": "-".join(str(stage.replicas) for stage in plan.stages),
        "predicted_step_s": statistics.median(predicted),
        "step_s": statistics.median(measured),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "repeats": repeats,
    }


def _watch(settings: TrainSettings) -> tuple[dict[int, float], Plan]:
    """The most that each worker of an auto-planned run has resident, and the plan."""
    chosen, plan = planned(settings, TWO, PlanWish("auto"))
    return _train(chosen, replace(TWO, environment=_ALLOCATOR), watched=True)[1], plan


def _memory_rows(settings: TrainSettings, light_bytes: float) -> list[Row]:
    peaks, plan = _watch(settings)
    rows: list[Row] = []
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            rows.append(
                {
                    "case": f"{settings.name}, batch {settings.data.batch_size}",
                    "plan": "-".join(str(stage.replicas) for stage in plan.stages),
                    "stage": number,
                    "worker": device,
                    "predicted_bytes": stage.memory_bytes,
                    "bytes": peaks[device] - light_bytes,
                    "ratio": (peaks[device] - light_bytes) / stage.memory_bytes,
                }
            )
    return rows


def step_s(plan: Plan, spans: Sequence[Operations]) -> float:
    """Seconds a step in the middle half of a run, by when microbatches came back to the first stage."""
    ends = sorted(
        end
        for event in spans
        for letter, stage, end in zip(event.letters, event.stages, event.ends)
        if letter in "BI" and stage == 0
    )
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (ends[last] - ends[first]) / (last - first) * plan.microbatches


def _train(
    settings: TrainSettings, placement: Placement, watched: bool
) -> tuple[list[Operations], dict[int, float]]:
    """What all workers of a run did, and by worker the bytes it had resident at most while training.

    Sampling takes its time from the workers, so a run's memory is watched or its seconds are believed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / "run")
        order: dict[str, Any] = {"settings": encode(settings), "folder": str(folder.path), "resume": False}
        order["watched"] = watched
        entry = "plait.experiments.pipeline_prediction:watched_worker"
        launch = placement.launch(entry, order, folder.logs, preload=("torch._dynamo",))
        samples = Supervisor(launch, Unwatched()).run()
        found: list[Operations] = []
        peaks: dict[int, float] = {}
        for rank, worker in samples.items():
            events = [r.event for r in read(folder.events(rank)) if isinstance(r.event, Operations)]
            found += events
            # At its end a pipeline keeps one version more than it needs, until the next stretch.
            begin, end = events[0].starts[0], events[-1].starts[-1]
            inside = [size for t, size in worker["samples"] if begin <= t <= end]
            peaks[rank] = max(inside, default=math.nan) - worker["before"]
    return found, peaks


def watched_worker(worker: Worker, order: dict[str, Any]) -> dict[str, Any]:
    """Be one worker of a run, whose memory is sampled all the while where that is asked for."""
    _warm_up()
    before = resident_bytes()
    with _sampling(order["watched"]) as samples:
        train(worker, order)
    return {"before": before, "samples": samples}


def _warm_up() -> None:
    """Have the libraries load and keep what they load and keep for any model, and give back the rest."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        optimizer.step()
    trace(model, (torch.randn(4, 1, 8, 8),))
    gc.collect()


@contextlib.contextmanager
def _sampling(wanted: bool) -> Iterator[list[tuple[float, int]]]:
    """Pairs of time and resident bytes, gathered while the block runs, where that is wanted."""
    samples: list[tuple[float, int]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            samples.append((time.time(), resident_bytes()))

    thread = threading.Thread(target=sample, daemon=True)
    if wanted:
        thread.start()
    try:
        yield samples
    finally:
        over.set()
        if wanted:
            thread.join()


def resident_bytes() -> int:
    """What the kernel counts as this process's memory now (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
