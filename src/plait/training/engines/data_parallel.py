"""Data parallel: every worker holds the model, works on its share of each batch, and gradients are summed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.adapt.changes import BatchSizeChange, Change, TopologyChange
from plait.data import loader
from plait.data.sampler import GlobalBatch, Position, mix
from plait.pipeline import named_state
from plait.schema.settings import TrainSettings
from plait.schema.topology import TopologyError
from plait.schema.topology_spec import TopologySpec, check_topology
from plait.training import checkpoint as checkpoints
from plait.training.audit.schedule import is_audited
from plait.training.audit.whole_model import AuditedStep
from plait.training.change.members import Mark, loss_of, most_advanced
from plait.training.checkpoint import Checkpoint
from plait.training.engine import EngineState, Trained, ask_rank_0, cannot_apply, whole_state
from plait.training.engines.train_step import TrainStep
from plait.training.evaluate import evaluate_parts
from plait.training.monitoring.asked import is_monitored
from plait.training.monitoring.whole_model import StepMonitor
from plait.training.run import Run

# A joiner warms up on this part of a batch.
WARM_UP_SHARES = 4


def with_topology_for(settings: TrainSettings, workers: int) -> TrainSettings:
    """The settings with a topology that this number of workers can sum over: a root may have left."""
    try:
        check_topology(settings.topology, workers)
    except TopologyError:
        return replace(settings, topology=TopologySpec())
    return settings


class WholeModelStart:
    """How a worker that holds the whole model comes to the state that all go on from."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def read(self, path: Path) -> Checkpoint:
        return checkpoints.load(path)

    def load(self, state: Checkpoint) -> None:
        load_whole(self._run, state)

    def start_state(self) -> EngineState:
        return whole_state(self._run.parts)

    def broadcast_start(self) -> None:
        self._run.broadcast_weights()


class DataParallelEngine(WholeModelStart):
    """Steps of a run whose workers each hold the whole model; also of a single process."""

    sees_end_of_data = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._step: TrainStep | None = None
        self._monitor: StepMonitor | None = None
        # The batches to come; loader processes read them ahead, also while an evaluation runs.
        self._batches: Iterator[loader.Batch] | None = None

    @property
    def parts_of_a_batch(self) -> int:
        return self._run.worker.world_size * self._run.settings.accumulate

    def open(self) -> None:
        if self._step is not None:
            return
        run = self._run
        if is_monitored(run.settings):
            self._monitor = StepMonitor(run, shared=run.worker.world_size > 1)
        settings = with_topology_for(run.settings, run.worker.world_size)
        self._step = TrainStep(run.worker, settings, run.parts, monitor=self._monitor)
        if run.worker.memberships.can_change:
            run.worker.memberships.on_loss(self._step.fail)
        if self._step.chosen is not None:
            run.metrics.note(self._step.chosen)
            # Measured once: workers that come and go must not wait for it again.
            run.set_topology(self._step.chosen.topology)

    def train(self, steps: int) -> Trained:
        run = self._run
        assert self._step is not None
        if self._batches is None:
            self._batches = run.own_batches()
        done, position = 0, run.trial.position
        for batch in itertools.islice(self._batches, steps):
            step = run.trial.step + done
            # Random numbers depend on the seed, the step and the rank alone: a resumed run draws the same.
            loader.seed_all(mix(run.settings.seed, step, run.worker.rank))
            # All workers take the same update.
            self._step.update_seed = mix(run.settings.seed, step)
            if self._monitor is not None:
                self._monitor.step = step + 1
            audited = self._begin_audit(step)
            try:
                with self._undone_by_losses():
                    loss, requests = self._step.step(batch, run.lr_factor(step))
            except RuntimeError as failure:
                lost = loss_of(run.worker, failure)
                if lost is None:
                    raise
                return Trained(done, position, lost=lost)
            done, position = done + 1, batch.after
            run.metrics.step(step + 1, batch.epoch, loss, run.lr(step), batch.total)
            if audited is not None:
                self._end_audit(audited, loss)
                if run.audits.difference is not None:
                    break
            if batch.last or requests.stop or requests.change:
                return Trained(done, position, requests.stop, batch.last, requests.change)
        return Trained(done, position, ended=done < steps and run.audits.difference is None)

    def _begin_audit(self, step: int) -> AuditedStep | None:
        run = self._run
        if run.worker.world_size == 1 or not is_audited(run.settings, step):
            return None
        assert self._step is not None
        seed = mix(run.settings.seed, step, run.worker.rank)
        audited = AuditedStep(run, step, seed, together=True)
        self._step.recorded = audited.parts
        return audited

    def _end_audit(self, audited: AuditedStep, loss: Tensor) -> None:
        assert self._step is not None
        self._step.recorded = None
        self._pause_monitor()
        try:
            audited.end(self._run.audits, loss)
        except RuntimeError as failure:
            # The next step finds the loss of another worker.
            if loss_of(self._run.worker, failure) is None:
                raise

    @contextlib.contextmanager
    def _undone_by_losses(self) -> Iterator[None]:
        """Give buffers back what they held where another worker is lost in a step: it is taken again."""
        if not self._run.worker.memberships.can_change:
            yield
            return
        buffers = [buffer for buffer in self._run.parts.model.buffers() if buffer.numel()]
        kept = [buffer.clone() for buffer in buffers]
        try:
            yield
        except RuntimeError:
            with torch.no_grad():
                for buffer, before in zip(buffers, kept):
                    buffer.copy_(before)
            raise

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

    def ask_first(self, ask: Callable[[], Any]) -> Any:
        return ask_rank_0(self._run.worker, ask)

    def apply(self, change: Change) -> None:
        assert self._step is not None
        self._pause_monitor()
        if isinstance(change, TopologyChange):
            # Noted first: should a worker be lost now, the rest goes on with it.
            self._run.set_topology(change.topology)
            self._step.switch(change.topology)
        elif isinstance(change, BatchSizeChange):
            # What was read ahead is in batches of the size before.
            self._batches = None
        else:
            raise cannot_apply(change, "data-parallel training")

    def synchronize(self) -> None:
        self._average_buffers()

    def choose_source(self, marks: Sequence[Mark]) -> int | None:
        return most_advanced(marks)

    def hand_over(self, staying: Sequence[int]) -> None:
        """Every worker holds everything."""

    def begin_anew(self) -> None:
        raise NotImplementedError("every worker holds the whole state")

    def warm_up(self) -> None:
        run = self._run
        source, size = run.parts.train_set, run.settings.data.batch_size
        if source.is_stream:
            return
        buffers = list(run.parts.model.buffers())
        kept = [buffer.clone() for buffer in buffers]
        samples = tuple(range(min(len(source), -(-size // WARM_UP_SHARES))))
        (batch,) = run.load(source, iter([GlobalBatch(0, samples, Position())]), loaders=0)
        TrainStep(run.worker, run.settings, run.parts, alone=True).time_backward(batch)
        with torch.no_grad():
            for buffer, before in zip(buffers, kept):
                buffer.copy_(before)

    def close(self) -> None:
        self._batches = None
        step, self._step = self._step, None
        if step is not None:
            step.close()

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
