"""What rank 0 records while it trains: events, for callbacks too, and progress for the supervisor."""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.adapt.progress_values import progress_of, stages_of
from plait.callbacks.callback import RunCallbacks, callbacks_of, make_callbacks
from plait.callbacks.records import StartRecord
from plait.core import run_events
from plait.core.codec import encode, finite, finite_numbers
from plait.core.events import Event, EventLog
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.results import RunResult
from plait.schema.settings import TrainSettings
from plait.training.components import Components

LOG_S = 0.1
REPORT_S = 0.2
log = logging.getLogger(__name__)


class RunRecorder:
    """Keeps the record of a run on rank 0; on other ranks it does nothing.

    A step costs an addition and a look at the clock. Unless `log_every_steps` asks otherwise, steps of the
    same tenth of a second share one event.
    """

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        components: Components,
        folder: RunDir,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._active = worker.rank == 0
        self._worker = worker
        self._settings = settings
        self._device = str(components.device)
        self._modes = components.modes
        self._parameters = sum(p.numel() for p in components.model.parameters())
        self._samples_of_epoch = components.train_set.length
        self._folder = folder
        self._callbacks = self._make_callbacks()
        self._log = EventLog(folder.events(), worker.rank, self._callbacks.handle) if self._active else None
        # The events of this worker, while another one keeps the record.
        self._own: EventLog | None = None
        self._started = self._mark = self._reported = self._clock()
        self._loss: torch.Tensor | float = 0.0
        self._steps = self._samples = self._all_samples = 0
        # None where the number of steps is unknown.
        self._total: int | None = 0
        # Samples of a step from now on.
        self.batch_size = settings.data.batch_size
        self._signals_at = 0.0
        self._last: tuple[int, int, float, float | None] = (0, 0, 0.0, None)
        self._rate = 0.0
        self._training_s = 0.0
        self._progress: dict[str, Any] = {}
        self._last_loss: torch.Tensor | None = None
        self._verified_s: float | None = None
        # Called when losses are read, with the step, the mean loss since the last event, and the last loss.
        self.on_loss: Callable[[int, float, float], None] = lambda step, mean, last: None

    def set_steps(self, steps: int) -> None:
        """Set the total number of steps, if it was unknown or has changed."""
        self._total = steps
        self._progress["steps"] = steps
        self._report(force=True)

    def start(self, step: int, steps: int | None) -> None:
        self._total = steps
        settings = self._settings
        self.record(
            run_events.RunStarted(
                name=settings.name,
                model=settings.model.factory,
                parameters=self._parameters,
                workers=self._worker.world_size,
                device=self._device,
                precision=settings.precision,
                samples=self._samples_of_epoch,
                batch_size=self.batch_size,
                steps=steps,
                step=step,
                seed=settings.seed,
                torch=torch.__version__,
            )
        )
        self._progress |= {"step": step, "steps": steps}

    def show_stages(self, settings: TrainSettings) -> None:
        """Have progress reports name the stages of a pipeline that was opened, by its present plan."""
        stages = settings.as_run().pipeline
        if stages is not None:
            self._progress |= stages_of(stages.plan)

    def begin_steps(self) -> None:
        """Start the clock of the steps: the time before was preparation.

        The first report says that the run has begun: until now it could be refused.
        """
        self._report(force=True)
        self._mark = self._clock()

    def step(
        self,
        step: int,
        epoch: int,
        loss: torch.Tensor,
        lr: float,
        samples: int,
        ended: float | None = None,
    ) -> None:
        """Record one step that `ended` at that time (default: now); `loss` may not be computed yet."""
        if not self._active:
            return
        self._loss = self._loss + loss
        self._last_loss = loss
        self._steps += 1
        self._samples += samples
        self._last = (step, epoch, lr, ended)
        every = self._settings.log_every_steps
        now = self._clock() if ended is None else ended
        if step % every == 0 if every else now - self._mark >= LOG_S:
            self._log_steps(step, epoch, lr, now)

    def log_rest(self) -> None:
        """Record the steps that are not in an event yet."""
        if self._steps:
            step, epoch, lr, ended = self._last
            self._log_steps(step, epoch, lr, self._clock() if ended is None else ended)

    def _log_steps(self, step: int, epoch: int, lr: float, now: float) -> None:
        seconds, loss = now - self._mark, float(self._loss) / self._steps
        self.record(run_events.Step(step, epoch, finite(loss), lr, self._samples, round(seconds, 6)))
        assert self._last_loss is not None
        self.on_loss(step, loss, float(self._last_loss))
        self._training_s += seconds
        self._all_samples += self._samples
        # A running mean over a few seconds, so that the time left follows changes of speed.
        weight = min(1.0, max(seconds / 3.0, self._samples / max(self._all_samples, 1)))
        self._rate += weight * (self._samples / seconds - self._rate)
        self._progress |= {
            "step": step,
            "epoch": epoch,
            "loss": finite(loss),
            "samples_per_s": round(self._rate, 1),
        }
        if self._total is not None:
            left = max(self._total - step, 0) * self.batch_size / max(self._rate, 1e-9)
            self._progress["left_s"] = round(left, 1)
        self._report(force=step == self._total)
        self._loss, self._steps, self._samples, self._mark = 0.0, 0, 0, now

    @property
    def is_loss_finite(self) -> bool:
        """Whether the last loss that this worker recorded is a number."""
        return self._last_loss is None or math.isfinite(float(self._last_loss))

    def evaluated(self, step: int, metrics: dict[str, float], samples: int, seconds: float) -> None:
        numbers = finite_numbers(metrics)
        self.record(run_events.Evaluated(step, numbers, samples, round(seconds, 6)))
        self._progress |= {f"test_{name}": value for name, value in numbers.items()}
        self._report(force=True)
        self.leave_out(seconds)

    def saved(self, step: int, seconds: float, best: bool) -> None:
        self.record(run_events.CheckpointSaved(step, round(seconds, 6), best))
        self.leave_out(seconds)

    def leave_out(self, seconds: float) -> None:
        """Leave `seconds` that have just passed out of the time of the steps, recorded or not."""
        self._mark += seconds
        step, epoch, lr, ended = self._last
        if ended is not None:
            self._last = step, epoch, lr, ended + seconds

    def refused(self, path: Path, reason: str) -> None:
        self.record(run_events.CheckpointRefused(str(path), reason))
        self.warn(f"checkpoint refused, trying the one before it: {reason}")

    def warn(self, message: str) -> None:
        """Warn the user, once for all workers."""
        if self._active:
            log.warning("%s", message)

    def end(
        self,
        step: int,
        reason: str,
        metrics: dict[str, float],
        best: dict[str, Any] | None,
        audited: tuple[int, float] | None = None,
    ) -> RunResult:
        """Close the record; returns the result of the run, without its folder."""
        seconds = self._clock() - self._started
        rate = self._all_samples / self._training_s if self._training_s else 0.0
        self.record(run_events.RunEnded(step, reason, round(seconds, 3), round(rate, 1), self._peak_memory()))
        self._close()
        return RunResult(
            reason=reason,
            step=step,
            steps=self._total,
            train_loss=None if self._last_loss is None else float(self._last_loss),
            test=metrics,
            best=best,
            samples_per_s=round(rate, 1),
            seconds=round(seconds, 3),
            workers=self._worker.world_size,
            device=self._device,
            mode=dict(self._modes),
            verified_s=self._verified_s,
            audited_steps=audited and audited[0],
            largest_difference=audited and audited[1],
        )

    def _peak_memory(self) -> int:
        """The most bytes that this worker held on its device."""
        if self._device.startswith("cuda"):
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def take_over(self) -> None:
        """Write the record from now on, in the events file of this worker: the previous writer is gone."""
        if self._active:
            return
        self._active = True
        self._callbacks = self._make_callbacks()
        if self._own is not None:
            self._own.close()
        self._log, self._own = self._open_own(self._callbacks.handle), None
        self._mark = self._clock()

    def leave(self) -> None:
        """Close the record: another worker writes it from now on."""
        self.log_rest()
        self._callbacks.end("left")
        self._close()

    def _close(self) -> None:
        for writer in (self._log, self._own):
            if writer is not None:
                writer.close()

    def fail(self) -> None:
        """Write all that is pending of a run that failed, including steps that are in no event yet."""
        with contextlib.suppress(Exception):  # a loss may be on a device that has failed
            self.log_rest()
        self._callbacks.end("failed")
        for writer in (self._log, self._own):
            if writer is not None:
                writer.flush()

    def verified(self, event: run_events.Verified) -> None:
        """Record that what was built computes what the plain model computes; the run's result says so."""
        self._verified_s = event.seconds
        self.record(event)

    def signals(self, signals: run_events.Signals) -> None:
        """Record signals, as often as steps."""
        every, now = self._settings.log_every_steps, self._clock()
        if self._active and (signals.step % every == 0 if every else now - self._signals_at >= LOG_S):
            self._signals_at = now
            self.record(signals)

    def record_here(self, event: Event) -> None:
        """Record an event of this worker, in the run's record or in an events file of this worker."""
        if self._active:
            self.record(event)
        else:
            self._own = self._own or self._open_own()
            self._own.record(event)
            self._own.flush()

    def _open_own(self, on_event: Callable[[Event], None] = lambda event: None) -> EventLog:
        return EventLog(self._folder.events(self._worker.id), self._worker.id, on_event)

    def _make_callbacks(self) -> RunCallbacks:
        """The callbacks of the run on the worker that keeps the record; none on others."""
        settings, path = self._settings, self._folder.path
        made = make_callbacks(callbacks_of(settings)) if self._active else []

        def start(step: int) -> StartRecord:
            return StartRecord(settings.name, path, step, encode(settings))

        return RunCallbacks(made, self._folder.checkpoints, start)

    def record(self, event: Event) -> None:
        """Write an event into the record."""
        if self._log is not None:
            self._log.record(event)
            self._progress |= progress_of(event)

    def _report(self, force: bool = False) -> None:
        now = self._clock()
        if self._active and (force or now - self._reported >= REPORT_S):
            self._reported = now
            self._worker.report(self._progress | {"memory_bytes": self._peak_memory()})
