"""How many trials an array holds: as many as fit, as many as pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from plait.fusion.errors import FusionError
from plait.fusion.width import Need, measure_need, saturated_width
from plait.runtime import build
from plait.runtime.loading import Batch
from plait.runtime.sampling import Position
from plait.runtime.settings import TrainSettings
from plait.runtime.sweep.array import Entry, FusedArray
from plait.runtime.sweep.feeds import Feed

# What a process beside the tensors of its models takes on a CPU.
CPU_OVERHEAD_BYTES = 400 * 10**6
# Of memory that is free now, what a sweep may plan with: other programs want some too.
SHARE = 0.8
STEPS = 4


def choose_width(settings: TrainSettings, device: torch.device, sets: tuple[Any, Any], trials: int) -> int:
    """The trials of one array, of `trials` that there are: as many as fit and as go faster together."""
    if trials < 2:
        return trials
    batch = Feed(sets[0], settings, Position(), pin=False).next()
    fits = min(trials, _fitting(settings, device, sets, batch))
    throughput: dict[int, float] = {}
    for width in _widths(fits):
        throughput[width] = width / _seconds(_stepper(settings, device, sets, batch, width), device)
        if saturated_width(throughput) != width:
            break
    return saturated_width(throughput)


def _widths(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return [*found, most] if most > 1 else found


def _fitting(settings: TrainSettings, device: torch.device, sets: tuple[Any, Any], batch: Batch) -> int:
    """The most trials that the memory of `device` holds, from steps on tensors without memory."""
    cpu = torch.device("cpu")
    try:
        need = measure_need(lambda width: _stepper(settings, cpu, sets, batch, width))
    except FusionError:
        raise
    except Exception:  # not every model runs on tensors without memory; then a step of two tells
        need = _measured_need(settings, sets, batch)
    if device.type == "cuda":
        return need.largest(torch.cuda.mem_get_info(device)[0] * SHARE)
    return need.largest(psutil.virtual_memory().available * SHARE, CPU_OVERHEAD_BYTES)


def _measured_need(settings: TrainSettings, sets: tuple[Any, Any], batch: Batch) -> Need:
    """A rough upper bound: weights, gradients and states, and as much again for what a step keeps."""
    model = build.build_model(settings.model, settings.seed)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    rows = sum(x.numel() * x.element_size() for x in batch.content if isinstance(x, torch.Tensor))
    return Need(0.0, 8.0 * weights + 200.0 * rows)


def _stepper(
    settings: TrainSettings, device: torch.device, sets: tuple[Any, Any], batch: Batch, width: int
) -> Callable[[], Any]:
    entries = [Entry(settings, build.build(settings, device, sets)) for _ in range(width)]
    array = FusedArray(entries)
    batches: Sequence[Batch] = [batch] * width
    return lambda: array.step(batches, [1.0] * width)


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a step: the least of a few, after one that warms up."""
    step()
    times = []
    for _ in range(STEPS):
        _finish(device)
        start = time.perf_counter()
        step()
        _finish(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
