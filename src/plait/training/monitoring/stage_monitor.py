"""Monitors of a pipeline's steps: each worker measures its stages, and the step's sums add them up.

Of each stage one worker measures the gradient's norms (`StageNorms`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from plait.adapt.monitors.gradient_noise import GradientAverages, GradientMoments
from plait.adapt.monitors.step_times import WorkerTimes
from plait.core.run_events import Signals
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.microbatches import MicrobatchSource
from plait.planner.replan import seconds_of_devices
from plait.planner.schedules.operations import Op
from plait.schema.settings import TrainSettings
from plait.training.monitoring.required_signals import wants_norms
from plait.training.monitoring.signals import step_signals
from plait.training.monitoring.stage_norms import StageNorms
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
        self._planned_s = planned_seconds(settings)
        self._norms: StageNorms | None = None
        schedule = pipeline.pipeline_layout.schedule
        if wants_norms(settings) and schedule.synchronous:
            self._norms = StageNorms(pipeline, len(averages))
        elif wants_norms(settings):
            warn(
                f"monitor: under schedule {schedule.value} the gradient of a batch is "
                f"never there at once, so there is no noise scale and no variance; use flush, gpipe or "
                f"zero-bubble"
            )
        self._busy_s, self._ended = 0.0, 0.0

    def begin_interval(self) -> None:
        """Restart the clock: steps follow after other work."""
        self._ended, self._busy_s = 0.0, self._pipeline.busy_s

    def begin_batch(self, ops: Iterable[Op], work: MicrobatchSource, samples: Sequence[int]) -> None:
        """Called before the operations of a step, which has these samples of each trial."""
        if self._norms is not None:
            self._norms.begin_batch(ops, work, samples)

    def numbers(self) -> list[float]:
        """This worker's measurements of the step that has just ended, to be summed over all workers."""
        now, busy_s = time.perf_counter(), self._pipeline.busy_s
        times = [0.0] * (2 * self._workers)
        if self._ended:
            times[self._rank] = max(busy_s - self._busy_s, 1e-9)
            times[self._workers + self._rank] = now - self._ended
        self._ended, self._busy_s = now, busy_s
        if self._norms is None:
            return times
        return [*times, *self._norms.moments.view(-1).tolist()]

    def arrive(self, step: int, loss: float, samples: Sequence[int], sums: Sequence[float]) -> None:
        """Process the sums of all workers' measurements of a step with these samples of each trial."""
        times, moments = sums[: 2 * self._workers], iter(sums[2 * self._workers :])
        for averages, count, variance, whole, missing in zip(self._averages, samples, *[moments] * 3):
            if not missing and whole > 0:
                averages.add(GradientMoments(variance, whole - variance / count), whole)
        busy, seconds = tuple(times[: self._workers]), tuple(times[self._workers :])
        known = WorkerTimes(busy, (0.0,) * self._workers).known
        trial, step_s = self._trials[0], max(seconds) if known else None
        signals = step_signals(trial, self._averages[0], self._workers, step + 1, loss, samples[0], step_s)
        self._on_signals(replace(signals, work_s=busy if known else (), planned_s=self._planned_s))
