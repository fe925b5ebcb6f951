"""Monitors of a pipeline's steps: each worker measures its stages, and the step's sums add them up.

Of each stage one worker compares the gradient of its first microbatch with the whole batch's. Weights that
stages share are left out: no worker sees their whole gradient after one microbatch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientAverages, GradientMoments, GradientNorms, estimate
from plait.adapt.monitors.squared_norms import gradients, squared_norm, trial_squared_norms
from plait.adapt.monitors.step_times import WorkerTimes
from plait.core.run_events import Signals
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.microbatches import MicrobatchSource
from plait.planner.replan import seconds_of_devices
from plait.planner.schedules.operations import Backward, BackwardWeight, Op
from plait.schema.settings import TrainSettings
from plait.training.monitoring.required_signals import wants_norms
from plait.training.monitoring.signals import step_signals
from plait.training.trial import Trial


def planned_seconds(settings: TrainSettings) -> tuple[float, ...]:
    """The planned compute seconds of each worker in a step."""
    assert settings.pipeline is not None
    plan = settings.pipeline.plan
    times = enumerate(seconds_of_devices(plan))
    seconds = tuple(each / plan.machines.device(device).speed for device, each in times)
    return seconds if all(seconds) else ()


class StageMonitor:
    """Measures the part of one worker in each step of the pipeline of a trial, or of fused trials.

    `worker` is its place among the workers, and their number. The gradient noise of each trial is added to
    its `averages`. `warn` is called with a message if something cannot be measured, `on_signals` with the
    signals of each step of the first trial.
    """

    def __init__(
        self,
        worker: tuple[int, int],
        trials: Sequence[Trial],
        pipeline: PipelineExecutor,
        averages: Sequence[GradientAverages],
        warn: Callable[[str], None],
        on_signals: Callable[[Signals], None] = lambda signals: None,
    ) -> None:
        self._trials = trials
        self._pipeline = pipeline
        self._rank, self._workers = worker
        self._averages = averages
        self._on_signals = on_signals
        settings = trials[0].settings
        self._norms = wants_norms(settings)
        self._planned_s = planned_seconds(settings)
        schedule = pipeline.pipeline_layout.schedule
        if self._norms and not schedule.synchronous:
            warn(
                f"monitor: under schedule {schedule.value} the gradient of a batch is "
                f"never there at once, so there is no noise scale and no variance; use flush, gpipe or "
                f"zero-bubble"
            )
            self._norms = False
        self._counted = pipeline.counted_parameters() if self._norms else {}
        if self._norms:
            pipeline.on_backward, pipeline.on_gradients = self._after_backward, self._before_update
        # In the current batch: the microbatch to measure in each stage, and the measurements.
        self._first: dict[int, int] = {}
        self._parts: dict[int, tuple[Tensor, list[float]]] = {}
        self._work: MicrobatchSource | None = None
        self._samples: Sequence[int] = ()
        # The variance and the squared norm of each trial's gradient, and in how many stages they are unknown.
        self._moments = torch.zeros(len(averages), 3, dtype=torch.float64)
        self._busy_s, self._ended = 0.0, 0.0

    def begin_interval(self) -> None:
        """Restart the clock: steps follow after other work."""
        self._ended, self._busy_s = 0.0, self._pipeline.busy_s

    def begin_batch(self, ops: Iterable[Op], work: MicrobatchSource, samples: Sequence[int]) -> None:
        """Called before the operations of a step, which has these samples of each trial."""
        backward = [op for op in ops if isinstance(op, (Backward, BackwardWeight))]
        counts = Counter(op.stage for op in backward)
        self._first = {op.stage: op.microbatch for op in reversed(backward) if counts[op.stage] > 1}
        self._parts, self._work, self._samples = {}, work, samples
        missing = [stage for stage in self._counted if stage not in self._first]
        self._moments = torch.zeros_like(self._moments)
        self._moments[:, 2] = len(missing)

    def _after_backward(self, stage: int, microbatch: int) -> None:
        if stage in self._counted and self._first.get(stage) == microbatch:
            assert self._work is not None
            rows = self._work.samples(microbatch)
            weights = [count / samples for count, samples in zip(rows, self._samples)]
            self._parts[stage] = self._squares(stage), weights

    def _squares(self, stage: int) -> Tensor:
        """The squared norm of each trial's present gradient in a stage."""
        found, trials = gradients(self._counted[stage]), len(self._averages)
        return trial_squared_norms(found, trials) if trials > 1 else squared_norm(found).view(1)

    def _before_update(self) -> None:
        """Estimate from this worker's stages; the gradients are those of the whole batch."""
        if not self._parts:
            return
        scales = self._pipeline.loss_scales.square()
        for stage, (parts, weights) in self._parts.items():
            norms = (torch.stack([parts.cpu(), self._squares(stage).cpu()]) / scales).tolist()
            for moments, weight, samples, part, whole in zip(self._moments, weights, self._samples, *norms):
                noise = (
                    estimate(GradientNorms(part / weight, weight, 1.0, whole, samples)) if weight else None
                )
                known = (0.0, 0.0, 1.0) if noise is None else (noise.variance, whole, 0.0)
                moments += torch.tensor(known, dtype=torch.float64)

    def numbers(self) -> list[float]:
        """This worker's measurements of the step that has just ended, to be summed over all workers."""
        now, busy_s = time.perf_counter(), self._pipeline.busy_s
        times = [0.0] * (2 * self._workers)
        if self._ended:
            times[self._rank] = max(busy_s - self._busy_s, 1e-9)
            times[self._workers + self._rank] = now - self._ended
        self._ended, self._busy_s = now, busy_s
        return [*self._moments.view(-1).tolist(), *times]

    def arrive(self, step: int, loss: float, samples: Sequence[int], sums: Sequence[float]) -> None:
        """Process the sums of all workers' measurements of a step with these samples of each trial."""
        moments, times = sums[: 3 * len(samples)], sums[3 * len(samples) :]
        for averages, count, (variance, whole, missing) in zip(
            self._averages, samples, zip(*[iter(moments)] * 3)
        ):
            if self._norms and not missing and whole > 0:
                averages.add(GradientMoments(variance, whole - variance / count), whole)
        busy, seconds = tuple(times[: self._workers]), tuple(times[self._workers :])
        known = WorkerTimes(busy, (0.0,) * self._workers).known
        trial, step_s = self._trials[0], max(seconds) if known else None
        signals = step_signals(trial, self._averages[0], self._workers, step + 1, loss, samples[0], step_s)
        self._on_signals(replace(signals, work_s=busy if known else (), planned_s=self._planned_s))
