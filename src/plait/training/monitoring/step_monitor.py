"""Monitors of the steps of a run on whole models; what must be known of all workers rides on their sums.

The times of a step, and the squared norm of its summed gradient, of which each worker computes a share,
travel with the sums of the step after it. So signals describe the step before the last, and are the same on
all workers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientNorms
from plait.adapt.monitors.squared_norms import gradients, squared_norm
from plait.adapt.monitors.step_times import StepTimer, WorkerTimes
from plait.launcher.worker_process import Worker
from plait.sync.allreduce.buckets import AllReduce
from plait.training.components import Components
from plait.training.monitoring.required_signals import wants_norms
from plait.training.monitoring.signals import step_signals
from plait.training.trial import Trial


@dataclass(frozen=True)
class _Step:
    """What is known of a step once its sums are there; its times and its gradient's norm follow."""

    step: int
    samples: int
    batch_size: int
    lr_factor: float
    topology: str
    # The loss scale, which the gradients' norms are divided by.
    scale: float
    loss: float = 0.0
    parts: float = 0.0
    weight: float = 0.0
    count: float = 0.0


def notes_of(workers: int) -> int:
    """How many extra scalars of a monitor are summed with the gradients of `workers` workers."""
    return 2 * workers + 4


class StepMonitor:
    """Measures one worker's steps of a trial together with the others; `shared` where they sum gradients.

    The other arguments are those of `ShareMonitor`.
    """

    def __init__(
        self,
        worker: Worker,
        trials: Sequence[Trial],
        components: Components,
        warn: Callable[[str], None],
        shared: bool,
    ) -> None:
        self._worker = worker
        self._trials = trials
        self._scaler = components.scaler
        self._rank = worker.rank if shared else 0
        self._workers = worker.world_size if shared else 1
        self._shared = shared
        settings = trials[0].settings
        self.norms = wants_norms(settings)
        # The current step, and the topology of its all-reduce.
        self.step = 0
        self.topology = settings.topology.name
        self._gradient_bytes = 0
        self._timer = StepTimer()
        self._device = components.device
        self._own_part: tuple[Tensor, float] | None = None
        self._share_of_norm = torch.zeros((), dtype=torch.float64, device=self._device)
        self._before: _Step | None = None
        # On GPUs, the numbers of the step before, which have arrived when the next ones are sent off.
        self._arriving: tuple[Tensor, torch.cuda.Event, _Step] | None = None
        if self.norms and not shared and settings.accumulate == 1:
            warn(
                "monitor: one worker that takes each batch as a whole has no part of it to compare with, so "
                "there is no noise scale and no variance; use accumulate: 2 or more, or more workers"
            )

    def watch(self, sync: AllReduce) -> None:
        """Measure the gradients that `sync` sums, from the next step on."""
        self._gradient_bytes = sync.gradient_bytes
        sync.measure_norms(self.norms)

    @property
    def notes(self) -> int:
        """How many numbers travel with a step's sums."""
        return notes_of(self._workers)

    def pause(self) -> None:
        """Something else than steps follows: an evaluation, a checkpoint."""
        self._timer.pause()

    def after_microbatch(self, parameters: Iterable[Tensor], weight: float) -> None:
        """Note the gradient of the first microbatch of a worker alone, `weight` of the batch."""
        if self.norms and not self._shared and self._own_part is None:
            self._own_part = squared_norm(gradients(parameters)), weight

    def begin_sum(self, weight: float) -> Tensor:
        """This worker's numbers to sum; its share is `weight` of the batch. The last is filled in."""
        self._timer.begin_sum()
        numbers = [0.0] * self.notes
        numbers[self._rank], numbers[self._workers + self._rank] = self._timer.last
        if self.norms:
            numbers[-3:] = weight, float(weight > 0), 0.0
        local = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        local[-4] = self._share_of_norm
        return local

    def end_sum(self, sync: AllReduce, loss: Tensor, sums: Tensor, samples: int) -> None:
        """Take the sums of all workers' numbers; the summed gradients are there."""
        self._timer.end_sum()
        if self.norms:
            self._share_of_norm = sync.squared_norm_of_share(self._rank, self._workers)
        self._take(torch.cat([loss.reshape(1), sums]), self._now(samples))

    def end_alone(self, loss: Tensor, parameters: Iterable[Tensor], samples: int) -> None:
        """Take a step of a worker alone, whose gradients are there."""
        self._timer.begin_sum()
        self._timer.end_sum()
        numbers = torch.zeros(1 + self.notes, dtype=torch.float64, device=self._device)
        numbers[0], numbers[1] = loss, self._timer.last[0]
        if self.norms and self._own_part is not None:
            square, weight = self._own_part
            numbers[-4] = squared_norm(gradients(parameters))
            numbers[-3], numbers[-2], numbers[-1] = weight, 1.0, square / weight
        self._own_part = None
        self._take(numbers, self._now(samples))

    def _now(self, samples: int) -> _Step:
        batch, scale = self._trials[0].batch, self._scaler.get_scale()
        return _Step(self.step, samples, batch.size, batch.lr_factor, self.topology, scale)

    def _take(self, numbers: Tensor, step: _Step) -> None:
        if self._device.type == "cpu":
            self._arrive(numbers.tolist(), step)
            return
        before = self._arriving
        host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._arriving = host, arrived, step
        if before is not None:
            before[1].synchronize()
            self._arrive(before[0].tolist(), before[2])

    def _arrive(self, numbers: list[float], now: _Step) -> None:
        loss, times, (whole, weight, count, parts) = numbers[0], numbers[1:-4], numbers[-4:]
        square = now.scale**2
        now = replace(now, loss=loss, parts=parts / square, weight=weight, count=count)
        # Times and the norm of the sum are those of the step before, but for a worker alone.
        done, trial = self._before if self._shared else now, self._trials[0]
        self._before = now
        if done is None:
            return
        if done.count:
            norms = GradientNorms(done.parts, done.weight, done.count, whole / done.scale**2, done.samples)
            trial.noise.update(norms)
        taken = WorkerTimes(tuple(times[: self._workers]), tuple(times[self._workers :]))
        known, links = taken.known, self._shared and taken.known
        step_s, workers = taken.step_s if known else None, self._worker.world_size
        trial.signals.add(
            replace(
                step_signals(trial, trial.noise, workers, done.step, done.loss, done.samples, step_s),
                batch_size=done.batch_size,
                lr_factor=done.lr_factor,
                topology=done.topology,
                work_s=taken.work_s if known else (),
                link_bytes_per_s=taken.link_bytes_per_s(self._gradient_bytes) if links else (),
            )
        )
