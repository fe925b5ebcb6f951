"""How many trials an array holds: as many as fit, as many as pay."""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.core.codec import decode, encode
from plait.core.errors import PlaitError
from plait.data.loader import Batch
from plait.fusion.errors import FusionError
from plait.fusion.trials.memory_need import OVERHEAD_BYTES, MemoryNeed, measure_need
from plait.fusion.verify import FusionReport
from plait.measure.fresh_process import FreshProcessError, FreshProcesses
from plait.schema.settings import TrainSettings
from plait.sweeping.fusable import NotFusedError, fused_work, short, why_failed
from plait.training import components
from plait.training.batch_streams import open_stream
from plait.training.components import TrialInit
from plait.training.engines.train_step import TrainStep, step_alone
from plait.training.fused.fused_components import FusedComponents
from plait.training.fused.shared_bases import base_held_once
from plait.training.optimizers.eager import use_eager_optimizers
from plait.training.setup.data import DataPair
from plait.training.setup.memory import free_bytes
from plait.training.trial import Trial

# Memory of a process on a CPU, in addition to its tensors.
CPU_OVERHEAD_BYTES = 400 * 10**6
# The share of free memory that a sweep plans with; the rest is for other programs.
SHARE = 0.8
# Pairs of steps that are timed: as many as fit into some seconds, so that small steps are timed often.
LEAST_PAIRS, MOST_PAIRS, TIMING_S = 5, 25, 2.0
# An array is made narrower only if a step per trial takes this much longer: timings are not more precise.
MARGIN = 1.1
# The measured widths, from which the memory of other widths is extrapolated.
WIDTHS = (1, 2)
# Wider arrays are not tried: by then a step is bound by the device.
MOST = 64
log = logging.getLogger(__name__)


class FailsAloneError(PlaitError):
    """The trial that represents its group fails alone; `str` says why."""


@dataclass(frozen=True)
class ArrayRequest:
    """A measurement of the width of arrays for trials like `settings`.

    `trials` is the largest width; if it is None, only a fused step of two trials is tried. Of `replicas`
    workers one measures a step on a share of the batch, alone: sums are not timed. If trials are in stages,
    it measures a step of all stages, microbatch after microbatch.
    """

    settings: TrainSettings
    device: str
    replicas: int
    verdict: FusionReport | None
    trials: int | None = None


def choose_width(fresh: FreshProcesses, asked: ArrayRequest, sets: DataPair) -> tuple[int, str]:
    """The width of an array: as many trials as fit and are faster together; and the reason if it is 1.

    Without a number of trials, 2. Measured in a separate process; NotFusedError if a fused step fails.
    """
    if asked.trials is not None and asked.trials < 2:
        return 1, ""
    # The last worker's share is the largest. Workers of stages share microbatches.
    share = (0, 1) if asked.settings.in_stages else (asked.replicas - 1, asked.replicas)
    batch = open_stream(sets[0], Trial(asked.settings), share).next()
    argument = {"asked": encode(asked), "batch": batch}
    try:
        answer = fresh.call(f"{__name__}:measure", argument, on_gpu=asked.device.startswith("cuda"))
    except FreshProcessError as failure:
        raise NotFusedError(short(str(failure))) from None
    if "fails alone" in answer:
        raise FailsAloneError(answer["fails alone"])
    return answer["width"], answer["why"]


def import_fake_tensors() -> None:
    """Import what torch needs for tensors without memory, which takes a second."""
    with FakeTensorMode():
        (torch.ones(1, requires_grad=True) * 2.0).backward()


@base_held_once()
def measure(argument: Mapping[str, Any]) -> dict[str, Any]:
    """The width of arrays and, where it is one, why; or why one trial fails by itself, if it does."""
    use_eager_optimizers()
    asked, batch = decode(ArrayRequest, argument["asked"]), argument["batch"]
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    steps = _Steps(asked, batch, device)
    try:
        with fused_work():
            if asked.trials is None:
                steps.of_width(2)()
                return {"width": 2, "why": ""}
            width, why = choose(steps, min(asked.trials, MOST))
            return {"width": width, "why": why}
    except NotFusedError as failure:
        if isinstance(failure.__cause__, FusionError):
            raise
        try:
            step_alone(steps.entries(1)[0], batch, 1.0)
        except Exception as error:  # a user's model can fail in any way
            if (why_alone := why_failed(error)) is not None:
                return {"fails alone": why_alone}
        raise


def choose(steps: _Steps, trials: int) -> tuple[int, str]:
    """The width, of `trials` at most: as many as fit and pay; where that is one, also why.

    If trials are in stages, more may fit than one worker can hold. Those are not timed: they pay if as many
    as it can hold do.
    """
    most = min(trials, steps.fitting())
    timed = min(most, steps.held_by_one())
    if timed < 2 <= most:
        return most, ""
    width, why = find_width(steps, max(1, timed))
    return (most, why) if width == timed else (width, why)


def find_width(steps: _Steps, width: int) -> tuple[int, str]:
    """The width, of `width` at most, at which a step of a trial takes least; where that is one, also why."""
    if width == 1:
        return 1, "the memory of the device holds one trial"
    # From the widest down: one comparison is enough where wide arrays pay, as they mostly do.
    wide = steps.of_width(width)
    while width > 1:
        narrow = steps.of_width(width // 2)
        slower = slower_by(steps.seconds(narrow, wide), width // 2, width)
        if slower <= MARGIN:
            return width, ""
        width, wide = width // 2, narrow
    return 1, f"two trials at once were {slower - 1:.0%} slower than one after the other here (measured)"


def slower_by(times: Sequence[tuple[float, float]], narrow: int, wide: int) -> float:
    """How much longer a step of a trial takes in the wide array than in the narrow one.

    The median of the ratios of steps that took turns: another program slows both of a pair down.
    """
    return statistics.median((wide_s / wide) / (narrow_s / narrow) for narrow_s, wide_s in times)


class _Steps:
    """Steps of arrays of some width, on one batch."""

    def __init__(self, asked: ArrayRequest, batch: Batch, device: torch.device) -> None:
        self._asked, self._batch, self._device = asked, batch, device
        self._settings = asked.settings
        if (pipeline := asked.settings.pipeline) is not None:
            self._settings = replace(asked.settings, pipeline=None, accumulate=pipeline.plan.microbatches)

    def entries(self, count: int, device: torch.device | None = None) -> list[TrialInit]:
        """Trials as they are before their first step."""
        settings, device = self._settings, device or self._device
        return [TrialInit(settings, components.build_without_data(settings, device)) for _ in range(count)]

    def of_width(self, width: int) -> Callable[[], Any]:
        return self._step_of(self.entries(width))

    def _step_of(self, entries: Sequence[TrialInit]) -> Callable[[], Any]:
        fused, width = FusedComponents(entries, verdict=self._asked.verdict), len(entries)
        step = TrainStep(fused, self._settings)
        return lambda: step.step([self._batch] * width, [1.0] * width)

    def fitting(self) -> int:
        """The most trials that the memory of the device holds, as they will train."""
        pipeline = self._asked.settings.pipeline
        by_worker = Counter[int]()
        for stage in () if pipeline is None else pipeline.plan.stages:
            by_worker.update(dict.fromkeys(stage.devices, stage.memory_bytes))
        if not any(by_worker.values()):  # also for a plan without costs, as an upper bound
            return self._largest(self._whole_need)
        # Each worker builds a trial whole, on its device, before it keeps its stages.
        return self._largest(MemoryNeed(0.0, max(by_worker.values()) + self._weight_bytes))

    def held_by_one(self) -> int:
        """The most trials of which one worker can hold all stages; 0 if not even one."""
        try:
            return self._largest(self._whole_need)
        except FusionError:
            if self._asked.settings.in_stages:
                return 0
            raise

    @cached_property
    def _entries_on_cpu(self) -> list[TrialInit]:
        # Single models are real, since moving and casting them needs memory; the fused model is on the meta
        # device.
        return self.entries(max(WIDTHS), torch.device("cpu"))

    @cached_property
    def _weight_bytes(self) -> float:
        model = self._entries_on_cpu[0].components.model
        return float(sum(p.numel() * p.element_size() for p in model.parameters()))

    @cached_property
    def _whole_need(self) -> MemoryNeed:
        """The memory of a step of whole models, from steps on tensors without memory."""
        entries, weights = self._entries_on_cpu, self._weight_bytes
        try:
            need = measure_need(lambda width: self._step_of(entries[:width]), WIDTHS)
        except FusionError:
            raise
        except Exception as failure:  # not every model runs on tensors without memory
            log.info("no step on tensors without memory (%s); an upper bound of its memory is used", failure)
            # Weights, gradients and states, and as much again for what a step keeps.
            rows = [x.nbytes for x in self._batch.content if isinstance(x, torch.Tensor)]
            need = MemoryNeed(0.0, 8.0 * weights + 200.0 * sum(rows))
        # Sums of gradients need buffers.
        trained = [p for p in entries[0].components.model.parameters() if p.requires_grad]
        beside = sum(p.nbytes for p in trained) if self._asked.replicas > 1 else 0
        return MemoryNeed(need.fixed_bytes, need.trial_bytes + beside)

    def _largest(self, need: MemoryNeed) -> int:
        overhead_bytes = OVERHEAD_BYTES if self._device.type == "cuda" else CPU_OVERHEAD_BYTES
        return need.largest(free_bytes(self._device) * SHARE, overhead_bytes)

    def seconds(self, narrow: Callable[[], Any], wide: Callable[[], Any]) -> list[tuple[float, float]]:
        """Seconds of steps of two arrays that take turns, after one of each that warms up."""
        narrow(), wide()
        times: list[tuple[float, float]] = []
        end = time.perf_counter() + TIMING_S
        while len(times) < LEAST_PAIRS or (len(times) < MOST_PAIRS and time.perf_counter() < end):
            times.append((self._time(narrow), self._time(wide)))
        return times

    def _time(self, step: Callable[[], Any]) -> float:
        started = self._now()
        step()
        return self._now() - started

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
