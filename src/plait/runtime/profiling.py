"""Profiling a job: its model on a batch of its own data, and the links between its workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.cluster.supervisor import Supervisor, Unwatched
from plait.cluster.worker import Worker
from plait.core.codec import decode, encode
from plait.core.errors import InputError
from plait.profiler.links import Link, measure_links
from plait.profiler.profile import Profile, profile_model
from plait.profiler.trace import trace
from plait.profiler.traced import TracedModel
from plait.runtime import build
from plait.runtime.launch import Placement
from plait.runtime.loading import SeededSamples, to_device
from plait.runtime.settings import TrainSettings
from plait.workloads.losses import build_loss


def profile_job(
    settings: TrainSettings,
    batch_size: int | None = None,
    *,
    threads: int | None = 1,
    repeats: int = 5,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """The job's model measured layer by layer on `batch_size` samples of its data (a microbatch).

    `threads` is what one worker will have; the job's whole batch serves where no size is given.
    """
    build.check(settings)
    device = build.choose_device(settings.device, 0)
    model, inputs, target = _example(settings, batch_size or settings.data.batch_size, device)
    loss = build_loss(settings.loss, settings.loss_args)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return profile_model(
            model,
            inputs,
            lambda output: loss(output, target),
            device=device,
            repeats=repeats,
            name=settings.model.factory,
            on_progress=on_progress,
        )
    finally:
        torch.set_num_threads(before)


def trace_job(settings: TrainSettings, samples: int = 4) -> TracedModel:
    """The job's model as its layers, traced on a few samples of its data."""
    model, inputs, _ = _example(settings, samples, torch.device("cpu"))
    return trace(model, inputs)


def _example(settings: TrainSettings, batch_size: int, device: torch.device) -> tuple[Any, Any, Any]:
    """The model, its inputs as a tuple or dict, and the target, for one batch of training data."""
    dataset = build.build_data(settings.data, "train")
    if len(dataset) < batch_size:
        raise InputError(f"--batch: found {batch_size}, but the data set has only {len(dataset)} samples")
    dtype = torch.float64 if settings.precision == "float64" else None
    content = SeededSamples(dataset, settings.seed).__getitems__([(0, i) for i in range(batch_size)])
    inputs, target = to_device(content, device, dtype)
    model = build.build_model(settings.model, settings.seed).to(dtype=dtype)
    if isinstance(inputs, (tuple, list)):
        return model, tuple(inputs), target
    return model, inputs if isinstance(inputs, dict) else (inputs,), target


def profile_links(placement: Placement, logs: Path) -> tuple[Link, ...]:
    """Bandwidth and latency between each pair of the placement's workers, which are started for it."""
    launch = placement.launch("plait.runtime.profiling:links_worker", {}, logs)
    results = Supervisor(launch, Unwatched()).run()
    return tuple(decode(Link, link, "link") for link in results[0]["links"])


def links_worker(worker: Worker, settings: dict[str, Any]) -> dict[str, Any]:
    """Be one worker of a measurement of links; every rank gets the same answer."""
    worker.join("gloo")
    links = measure_links(host=worker.host)
    return {"links": [encode(link) for link in links]}
