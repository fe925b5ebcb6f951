"""How many trials an array holds: as many as fit, as many as pay."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from plait.core.errors import InputError
from plait.data.loader import Batch
from plait.data.sampler import Position
from plait.fusion.errors import FusionError
from plait.fusion.trials.array_size import MemoryNeed, measure_need, saturated_width
from plait.fusion.verify import Verdict
from plait.schema.settings import TrainSettings
from plait.sweeping.engines.batch_streams import BatchStream
from plait.sweeping.engines.fused import FusedArray, TrialInit
from plait.training import components

# What a process beside the tensors of its models takes on a CPU.
CPU_OVERHEAD_BYTES = 400 * 10**6
# Of memory that is free now, what a sweep may plan with: other programs want some too.
SHARE = 0.8
STEPS = 4
# The widths from whose memory that of others follows.
WIDTHS = (1, 2)
# Wider arrays are not tried: by then a step is bound by the device.
MOST = 64
log = logging.getLogger(__name__)


def choose_width(
    settings: TrainSettings,
    device: torch.device,
    sets: tuple[Any, Any],
    trials: int,
    replicas: int = 1,
    verdict: Verdict | None = None,
) -> tuple[int, str]:
    """The trials of one array, of `trials` that there are: as many as fit and as go faster together.

    Where that is one, also why. Of `replicas` workers this one measures a step on a share of the batch,
    alone: sums are not timed.
    """
    if trials < 2:
        return 1, ""
    # The last worker's share is the largest.
    batch = BatchStream(sets[0], settings, Position(), False, replicas - 1, replicas).next()
    # Sums of gradients need buffers.
    beside = _weight_bytes(settings) if replicas > 1 else 0
    width = min(trials, MOST, _fitting(settings, device, sets, batch, beside, verdict))
    if width == 1:
        return 1, "the memory of the device holds one trial"

    def throughput(count: int) -> float:
        return count / _seconds(_stepper(_entries(settings, device, sets, count), batch, verdict), device)

    # From the widest down: two measurements are enough where wide arrays pay, as they mostly do.
    wide = throughput(width)
    while width > 1:
        narrow = throughput(width // 2)
        if saturated_width({width // 2: narrow, width: wide}) == width:
            return width, ""
        width, wide = width // 2, narrow
    return 1, "two trials at once were no faster than one after the other on this device (measured)"


def _fitting(
    settings: TrainSettings,
    device: torch.device,
    sets: tuple[Any, Any],
    batch: Batch,
    beside: int,
    verdict: Verdict | None = None,
) -> int:
    """The most trials that the memory of `device` holds, from steps on tensors without memory.

    Each trial needs `beside` bytes more than its step does.
    """
    # The lone models are real, as moving and casting them needs memory; what is fused of them is not.
    entries = _entries(settings, torch.device("cpu"), sets, max(WIDTHS))
    try:
        need = measure_need(lambda width: _stepper(entries[:width], batch, verdict), WIDTHS)
    except FusionError:
        raise
    except Exception as failure:  # not every model runs on tensors without memory
        log.info("no step on tensors without memory (%s); an upper bound of its memory is used", failure)
        need = _rough_need(settings, batch)
    need = MemoryNeed(need.fixed_bytes, need.trial_bytes + beside)
    try:
        if device.type == "cuda":
            return need.largest(torch.cuda.mem_get_info(device)[0] * SHARE)
        # The workers of a host share its memory.
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return need.largest(psutil.virtual_memory().available * SHARE / workers, CPU_OVERHEAD_BYTES)
    except FusionError as failure:  # one trial is too large, fused or not
        raise InputError(str(failure)) from None


def try_two(
    settings: TrainSettings,
    device: torch.device,
    sets: tuple[Any, Any],
    replicas: int = 1,
    verdict: Verdict | None = None,
) -> None:
    """Take a step with two fused trials; raises what it raises."""
    batch = BatchStream(sets[0], settings, Position(), False, replicas - 1, replicas).next()
    _stepper(_entries(settings, device, sets, 2), batch, verdict)()


def _rough_need(settings: TrainSettings, batch: Batch) -> MemoryNeed:
    """A rough upper bound: weights, gradients and states, and as much again for what a step keeps."""
    weights = _weight_bytes(settings)
    rows = sum(x.numel() * x.element_size() for x in batch.content if isinstance(x, torch.Tensor))
    return MemoryNeed(0.0, 8.0 * weights + 200.0 * rows)


def _weight_bytes(settings: TrainSettings) -> int:
    model = components.build_model(settings.model, settings.seed)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _entries(
    settings: TrainSettings, device: torch.device, sets: tuple[Any, Any], count: int
) -> list[TrialInit]:
    return [TrialInit(settings, components.build(settings, device, sets)) for _ in range(count)]


def _stepper(entries: Sequence[TrialInit], batch: Batch, verdict: Verdict | None = None) -> Callable[[], Any]:
    array, width = FusedArray(entries, verdict=verdict), len(entries)
    return lambda: array.step([batch] * width, [1.0] * width)


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
