"""How many trials an array holds: as many as fit, as many as pay."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.core.codec import decode, encode
from plait.core.errors import PlaitError
from plait.data.loader import Batch
from plait.data.sampler import Position
from plait.fusion.errors import FusionError
from plait.fusion.trials.array_size import MemoryNeed, measure_need
from plait.fusion.verify import FusionReport
from plait.measure.fresh_process import FreshProcessError, FreshProcesses
from plait.schema.settings import TrainSettings
from plait.sweeping.reasons import NotFusedError, fused_work, short, why_failed
from plait.training import components
from plait.training.batch_streams import open_stream
from plait.training.components import DataPair
from plait.training.engines.train_step import TrainStep, step_alone
from plait.training.fused.fused_components import FusedComponents, TrialInit
from plait.training.optimizers.eager import use_eager_optimizers

# What a process beside the tensors of its models takes on a CPU.
CPU_OVERHEAD_BYTES = 400 * 10**6
# Of memory that is free now, what a sweep may plan with: other programs want some too.
SHARE = 0.8
# Pairs of steps that are timed: as many as fit into some seconds, so that small steps are timed often.
LEAST_PAIRS, MOST_PAIRS, TIMING_S = 5, 25, 2.0
# An array is made narrower only where a step of a trial takes this much longer in it: times are no surer.
MARGIN = 1.1
# The widths from whose memory that of others follows.
WIDTHS = (1, 2)
# Wider arrays are not tried: by then a step is bound by the device.
MOST = 64
log = logging.getLogger(__name__)


def choose_width(
    fresh: FreshProcesses,
    settings: TrainSettings,
    device: torch.device,
    sets: DataPair,
    trials: int,
    replicas: int = 1,
    verdict: FusionReport | None = None,
) -> tuple[int, str]:
    """The trials of one array, of `trials` that there are: as many as fit and as go faster together.

    Where that is one, also why. Of `replicas` workers this one measures a step on a share of the batch,
    alone: sums are not timed. All is measured in a process of its own.
    """
    if trials < 2:
        return 1, ""
    found = _measured(fresh, "measure_width", settings, device, sets, replicas, verdict, trials=trials)
    return found["width"], found["why"]


class FailsAloneError(PlaitError):
    """The trial that stands for its group fails by itself; `str` says why."""


def try_two(
    fresh: FreshProcesses,
    settings: TrainSettings,
    device: torch.device,
    sets: DataPair,
    replicas: int = 1,
    verdict: FusionReport | None = None,
) -> None:
    """Take a step with two fused trials, in a process of its own; NotFusedError where it fails."""
    _measured(fresh, "take_step_of_two", settings, device, sets, replicas, verdict)


def _measured(
    fresh: FreshProcesses,
    function: str,
    settings: TrainSettings,
    device: torch.device,
    sets: DataPair,
    replicas: int,
    verdict: FusionReport | None,
    **more: Any,
) -> Any:
    """What a function of this module finds in another process; NotFusedError where it fails there."""
    # The last worker's share is the largest.
    batch = open_stream(sets[0], settings, Position(), (replicas - 1, replicas)).next()
    argument = {
        "settings": encode(settings),
        "device": str(device),
        "batch": batch,
        "replicas": replicas,
        "verdict": None if verdict is None else encode(verdict),
        **more,
    }
    try:
        found = fresh.call(f"{__name__}:{function}", argument, on_gpu=device.type == "cuda")
    except FreshProcessError as failure:
        raise NotFusedError(short(str(failure))) from None
    if "fails alone" in found:
        raise FailsAloneError(found["fails alone"])
    return found


def import_fake_tensors() -> None:
    """Import what torch needs for tensors without memory, which takes a second."""
    with FakeTensorMode():
        (torch.ones(1, requires_grad=True) * 2.0).backward()


def measure_width(argument: dict[str, Any]) -> dict[str, Any]:
    """The width of arrays and, where it is one, why."""
    asked = _Asked.of(argument)

    def measure() -> dict[str, Any]:
        width, why = _measure_width(asked, argument["trials"])
        return {"width": width, "why": why}

    return _or_fails_alone(asked, measure)


def take_step_of_two(argument: dict[str, Any]) -> dict[str, Any]:
    """Take a step of two fused trials."""
    asked = _Asked.of(argument)

    def take() -> dict[str, Any]:
        _stepper(asked, 2)()
        return {}

    return _or_fails_alone(asked, take)


def _or_fails_alone(asked: _Asked, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` finds of fused trials; where it fails, why one trial fails by itself, if it does."""
    try:
        with fused_work():
            return measure()
    except NotFusedError as failure:
        if isinstance(failure.__cause__, FusionError):
            raise
        try:
            step_alone(_entries(asked, 1)[0], asked.batch, 1.0)
        except Exception as own:  # a user's model can fail in any way
            if (why := why_failed(own)) is not None:
                return {"fails alone": why}
        raise


@dataclass(frozen=True)
class _Asked:
    """What is measured: trials of these settings on a device and a batch."""

    settings: TrainSettings
    device: torch.device
    batch: Batch
    replicas: int
    verdict: FusionReport | None

    @classmethod
    def of(cls, argument: Mapping[str, Any]) -> _Asked:
        use_eager_optimizers()
        verdict, device = argument["verdict"], torch.device(argument["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return cls(
            decode(TrainSettings, argument["settings"], "settings"),
            device,
            argument["batch"],
            argument["replicas"],
            None if verdict is None else decode(FusionReport, verdict, "verdict"),
        )


def _measure_width(asked: _Asked, trials: int) -> tuple[int, str]:
    width = min(trials, MOST, _fitting(asked))
    if width == 1:
        return 1, "the memory of the device holds one trial"
    # From the widest down: one comparison is enough where wide arrays pay, as they mostly do.
    wide = _stepper(asked, width)
    while width > 1:
        narrow = _stepper(asked, width // 2)
        slower = slower_by(_seconds(narrow, wide, asked.device), width // 2, width)
        if slower <= MARGIN:
            return width, ""
        width, wide = width // 2, narrow
    return 1, f"two trials at once were {slower - 1:.0%} slower than one after the other here (measured)"


def slower_by(times: Sequence[tuple[float, float]], narrow: int, wide: int) -> float:
    """How much longer a step of a trial takes in the wide array than in the narrow one.

    The median of the ratios of steps that took turns: another program slows both of a pair down.
    """
    return statistics.median((wide_s / wide) / (narrow_s / narrow) for narrow_s, wide_s in times)


def _fitting(asked: _Asked) -> int:
    """The most trials that the memory of the device holds, from steps on tensors without memory."""
    # The lone models are real, as moving and casting them needs memory; what is fused of them is not.
    on_cpu = replace(asked, device=torch.device("cpu"))
    entries = _entries(on_cpu, max(WIDTHS))
    # Sums of gradients need buffers.
    beside = _weight_bytes(asked.settings) if asked.replicas > 1 else 0
    try:
        need = measure_need(lambda width: _step_of(asked, entries[:width]), WIDTHS)
    except FusionError:
        raise
    except Exception as failure:  # not every model runs on tensors without memory
        log.info("no step on tensors without memory (%s); an upper bound of its memory is used", failure)
        need = _rough_need(asked.settings, asked.batch)
    need = MemoryNeed(need.fixed_bytes, need.trial_bytes + beside)
    if asked.device.type == "cuda":
        return need.largest(torch.cuda.mem_get_info(asked.device)[0] * SHARE)
    # The workers of a host share its memory.
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return need.largest(psutil.virtual_memory().available * SHARE / workers, CPU_OVERHEAD_BYTES)


def _rough_need(settings: TrainSettings, batch: Batch) -> MemoryNeed:
    """A rough upper bound: weights, gradients and states, and as much again for what a step keeps."""
    weights = _weight_bytes(settings)
    rows = sum(x.numel() * x.element_size() for x in batch.content if isinstance(x, torch.Tensor))
    return MemoryNeed(0.0, 8.0 * weights + 200.0 * rows)


def _weight_bytes(settings: TrainSettings) -> int:
    model = components.build_model(settings.model, settings.seed)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _entries(asked: _Asked, count: int) -> list[TrialInit]:
    build = components.build_without_data
    return [TrialInit(asked.settings, build(asked.settings, asked.device)) for _ in range(count)]


def _stepper(asked: _Asked, width: int) -> Callable[[], Any]:
    return _step_of(asked, _entries(asked, width))


def _step_of(asked: _Asked, entries: Sequence[TrialInit]) -> Callable[[], Any]:
    step, width = TrainStep(FusedComponents(entries, verdict=asked.verdict), asked.settings), len(entries)
    return lambda: step.step([asked.batch] * width, [1.0] * width)


def _seconds(
    narrow: Callable[[], Any], wide: Callable[[], Any], device: torch.device
) -> list[tuple[float, float]]:
    """Seconds of steps of two arrays that take turns, after one of each that warms up."""
    for step in (narrow, wide):
        step()
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(times) < LEAST_PAIRS or (len(times) < MOST_PAIRS and time.perf_counter() - began < TIMING_S):
        times.append((_time(narrow, device), _time(wide, device)))
    return times


def _time(step: Callable[[], Any], device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    step()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
