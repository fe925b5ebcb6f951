"""Data parallel: every worker holds the model, works on its share of each batch, and gradients are summed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from plait.adapt.changes import BatchSizeChange, Change, TopologyChange
from plait.data import loader
from plait.data.sampler import mix
from plait.pipeline import named_state
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import Checkpoint
from plait.training.engine import EngineState, Trained, cannot_apply, whole_state
from plait.training.engines.train_step import TrainStep
from plait.training.evaluate import evaluate_parts
from plait.training.monitoring.asked import is_monitored
from plait.training.monitoring.whole_model import StepMonitor
from plait.training.run import Run


class DataParallelEngine:
    """Steps of a run whose workers each hold the whole model; also of a single process."""

    sees_end_of_data = True

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step: TrainStep | None = None
        self._monitor: StepMonitor | None = None
        # The batches to come; loader processes read them ahead, also while an evaluation runs.
        self._batches: Iterator[loader.Batch] | None = None

    @property
    def parts_of_a_batch(self) -> int:
        return self._run.worker.world_size * self._run.settings.accumulate

    def read(self, path: Path) -> Checkpoint:
        return checkpoints.load(path)

    def load(self, state: Checkpoint) -> None:
        load_whole(self._run, state)

    def start_state(self) -> EngineState:
        return whole_state(self._run.parts)

    def broadcast_start(self) -> None:
        self._run.broadcast_weights()

    def open(self) -> None:
        if self._step is not None:
            return
        run = self._run
        if is_monitored(run.settings):
            self._monitor = StepMonitor(run, shared=run.worker.world_size > 1)
        self._step = TrainStep(run.worker, run.settings, run.parts, monitor=self._monitor)
        if self._step.chosen is not None:
            self._run.metrics.note(self._step.chosen)

    def train(self, steps: int) -> Trained:
        run = self._run
        assert self._step is not None
        if self._batches is None:
            self._batches = run.own_batches()
        done, position = 0, run.position
        for batch in itertools.islice(self._batches, steps):
            step = run.step + done
            # Random numbers depend on the seed, the step and the rank alone: a resumed run draws the same.
            loader.seed_all(mix(run.settings.seed, step, run.worker.rank))
            if self._monitor is not None:
                self._monitor.step = step + 1
            loss, stop = self._step.step(batch, run.lr_factor(step))
            done, position = done + 1, batch.after
            run.metrics.step(step + 1, batch.epoch, loss, run.lr(step), batch.total)
            if batch.last or stop:
                return Trained(done, position, stopped=stop, ended=batch.last)
        return Trained(done, position, ended=done < steps)

    def evaluate(self) -> dict[str, float]:
        run = self._run
        self._pause_monitor()
        self._average_buffers()
        return evaluate_parts(run.parts, run.settings, run.worker.rank, run.worker.world_size)

    def state(self) -> EngineState | None:
        self._pause_monitor()
        self._average_buffers()
        return whole_state(self._run.parts) if self._run.worker.rank == 0 else None

    def finish(self, save: Callable[[], None]) -> None:
        save()

    def apply(self, change: Change) -> None:
        assert self._step is not None
        self._pause_monitor()
        if isinstance(change, TopologyChange):
            self._step.switch(change.topology)
        elif isinstance(change, BatchSizeChange):
            # What was read ahead is in batches of the size before.
            self._batches = None
        else:
            raise cannot_apply(change, "data-parallel training")

    def synchronize(self) -> None:
        self._average_buffers()

    def close(self) -> None:
        self._batches = None
        if self._step is not None:
            self._step.close()

    def _pause_monitor(self) -> None:
        """What comes now takes no time of a step."""
        if self._monitor is not None:
            self._monitor.pause()

    def _average_buffers(self) -> None:
        assert self._step is not None
        self._step.average_buffers()


def load_whole(run: Run, state: Checkpoint) -> None:
    """Go on from the tensors of a checkpoint on a worker that holds the whole model."""
    checkpoints.load_model_state(run.parts.model, state.model)
    named_state.load_optimizer_state(run.parts.optimizer, run.parts.names, state.optimizer)
