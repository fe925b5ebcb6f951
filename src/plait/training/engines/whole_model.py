"""Whole models: each worker of a group holds all of it and takes its share of a batch; gradients are summed.

The model is one trial's, or several trials fused; a worker alone is a group of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from plait.adapt.changes import BatchSizeChange, Change, TopologyChange
from plait.adapt.members import ProgressMark, loss_of, most_advanced
from plait.data.loader import Batch, BatchStream, load
from plait.data.sampler import GlobalBatch, Position
from plait.launcher.worker_process import Worker
from plait.schema.settings import TrainSettings
from plait.schema.topology_spec import fitting, read_topology_spec
from plait.training.batch_streams import next_batches
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import TrialInit
from plait.training.engine import IntervalResult, cannot_apply
from plait.training.engines.train_step import AnyComponents, StepRequests, TrainStep, requests_of
from plait.training.evaluate import results
from plait.training.monitoring.step_monitor import StepMonitor
from plait.training.trial import Trial
from plait.training.worker_group import ALONE, WorkerGroup, group_of_world

# A joining worker warms up on one of this many parts of a batch.
WARM_UP_SHARES = 4


class StepAudit(Protocol):
    """Repeats some steps of trials with plain PyTorch and compares."""

    def begin(
        self, step: TrainStep, done: int, share: int, batches: Sequence[Batch], factors: Sequence[float]
    ) -> None:
        """Called before this worker takes a share of the step after `done` steps of the interval."""

    def end(self, step: TrainStep, losses: Tensor) -> bool:
        """Called after the step; returns True if training must stop."""


# Called after each step: how many of the interval are done, the trials' losses and their batches.
OnStep = Callable[[int, Tensor, Sequence[Batch]], None]


class WholeModelEngine:
    """The engine for trials whose whole model is on each worker of a group.

    All trials take steps together, each on batches from its `feed`. `on_step` is called after each step.
    `audit` repeats some steps with plain PyTorch. The monitor of `make_monitor`, which is passed whether
    there are other workers, measures steps.
    """

    def __init__(
        self,
        worker: Worker,
        trials: list[Trial],
        components: AnyComponents,
        feed: Callable[[Trial], BatchStream],
        on_step: OnStep,
        audit: StepAudit | None = None,
        make_monitor: Callable[[bool], StepMonitor | None] = lambda shared: None,
        group: WorkerGroup | None = None,
    ) -> None:
        self._worker = worker
        self.trials = trials
        self.components = components
        self._feed = feed
        self._on_step = on_step
        self._audit = audit
        self._make_monitor = make_monitor
        # Set in a sweep; in a run the group is that of its members.
        self._fixed_group = group
        self._group = group or ALONE
        self._step: TrainStep | None = None
        self._monitor: StepMonitor | None = None
        # The batches and learning rate factors of the current step: if it fails, each trial is tried alone on
        # them.
        self.in_progress: tuple[Sequence[Batch], Sequence[float]] = ((), ())
        # Steps done in the current interval.
        self.done = 0

    @property
    def is_in_step(self) -> bool:
        """Whether a step is in progress, with its data read."""
        return bool(self.in_progress[0])

    @property
    def settings(self) -> TrainSettings:
        """The settings of the first trial, for what all trials have in common."""
        return self.trials[0].settings

    def load(self, state: Checkpoint) -> None:
        self.components.load(state)

    def open(self) -> None:
        if self._step is not None:
            return
        self._group = self._fixed_group or group_of_world(self._worker)
        self._monitor = self._make_monitor(not self._group.is_alone)
        memberships = self._worker.memberships
        self._step = TrainStep(
            self.components,
            replace(self.settings, topology=fitting(self.settings.topology, self._group.size)),
            self._group,
            requests=self._requests,
            rank=self._group.place,
            may_fail=memberships.can_change,
            monitor=self._monitor,
        )
        if memberships.can_change and not self._group.is_alone:
            memberships.on_loss(self._step.fail)
        if self._step.chosen is not None:
            # Measured once: later members must not wait for it again.
            self._set_topology(self._step.chosen)

    def _requests(self) -> StepRequests:
        return requests_of(self._worker)

    def _set_topology(self, name: str) -> None:
        """Use the topology of that name for gradients from now on, also after a change of members."""
        for trial in self.trials:
            trial.settings = replace(trial.settings, topology=read_topology_spec(name))

    def train(self, steps: int) -> IntervalResult:
        step, trials = self._open_step, self.trials
        done, positions = 0, tuple(trial.position for trial in trials)
        self.done = 0
        while done < steps:
            self.in_progress = (), ()
            batches = next_batches([self._stream_of(trial) for trial in trials])
            if not batches:
                return IntervalResult(done, positions, ended=True)
            numbers = [trial.step + done for trial in trials]
            factors = [trial.lr_factor(number) for trial, number in zip(trials, numbers)]
            # Random numbers depend only on the seed, the step and the rank: a resumed run draws the same.
            step.update_seed = self.components.seed_step(self.settings.seed, numbers[0], self._group.share[0])
            self.in_progress = batches, factors
            if self._monitor is not None:
                self._monitor.step = numbers[0] + 1
            if self._audit is not None:
                self._audit.begin(step, done, self._group.place, batches, factors)
            try:
                with self._undone_by_losses():
                    losses, requests = step.step(batches, factors)
            except RuntimeError as failure:
                lost = None if self._group.is_alone else loss_of(self._worker, failure)
                if lost is None:
                    raise
                return IntervalResult(done, positions, lost=lost)
            self.done = done = done + 1
            positions = tuple(batch.after for batch in batches)
            self._on_step(done, losses, batches)
            if self._audit is not None and self._audited(self._audit, losses):
                break
            last = batches[0].last
            if last or requests.stop or requests.change:
                return IntervalResult(done, positions, requests.stop, last, requests.change)
        return IntervalResult(done, positions)

    def _stream_of(self, trial: Trial) -> BatchStream:
        if trial.stream is None:
            # Loader processes prefetch, also during evaluations.
            trial.stream = self._feed(trial)
        return trial.stream

    def _audited(self, audit: StepAudit, losses: Tensor) -> bool:
        """End the audit of a step; returns True if training must stop."""
        try:
            return audit.end(self._open_step, losses)
        except RuntimeError as failure:
            # If a worker was lost, the next step reports it.
            if self._group.is_alone or loss_of(self._worker, failure) is None:
                raise
            return False

    @contextlib.contextmanager
    def _undone_by_losses(self) -> Iterator[None]:
        """Restore buffers if another worker is lost in a step, which is then repeated."""
        if not self._worker.memberships.can_change or self._group.is_alone:
            yield
            return
        with _restored_buffers(self.components, RuntimeError):
            yield

    def evaluate(self, slots: Sequence[int] = (0,)) -> list[dict[str, float]]:
        self._open_step.pause_monitor()
        self.synchronize()
        components, settings = self.components, [trial.settings for trial in self.trials]
        totals = components.totals(slots, settings, self._group.share)
        return results(self._group, [components.of_trial(slot) for slot in slots], totals)

    def state(self, slot: int = 0) -> EngineState | None:
        self._open_step.pause_monitor()
        self.synchronize()
        return self.components.state(slot) if self._group.is_first else None

    def apply(self, change: Change) -> None:
        self._open_step.pause_monitor()
        if isinstance(change, TopologyChange):
            # Recorded first: if a worker is lost now, the others continue with it.
            self._set_topology(change.topology)
            self._open_step.switch(change.topology)
        elif not isinstance(change, BatchSizeChange):
            raise cannot_apply(change, "data-parallel training")

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials that cannot join the present ones, before anything changes."""
        self.components.check_entering(entering)

    def change_trials(
        self, leaving: Sequence[int], entering: Sequence[TrialInit], trials: list[Trial]
    ) -> None:
        """Remove and add trials; `trials` are the trials after the change."""
        if self._step is not None:
            # The all-reduce has autograd hooks for the present shapes.
            self._step.close()
            self._step = None
        self.components = self.components.change(leaving, entering)
        self.trials = trials
        self.open()

    def synchronize(self, staying: Sequence[int] = ()) -> None:
        """Give all workers the same running statistics; the rest of their state is always the same."""
        self._open_step.average_buffers()

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        return most_advanced(marks), self.components.state()

    def close(self) -> None:
        self._forget_streams()
        step, self._step = self._step, None
        if step is not None:
            step.close()

    def _forget_streams(self) -> None:
        for trial in self.trials:
            trial.stream = None

    @property
    def _open_step(self) -> TrainStep:
        assert self._step is not None
        return self._step


def warm_up(components: AnyComponents, settings: TrainSettings) -> None:
    """Run forward and backward on this worker alone, so that its first step is not slower than others."""
    source = components.train_set
    if source.is_stream:
        return
    samples = tuple(range(min(len(source), -(-settings.data.batch_size // WARM_UP_SHARES))))
    order = iter([GlobalBatch(0, samples, Position())])
    (batch,) = load(source, order, seed=settings.seed, rank=0, world_size=1, loaders=0)
    with _restored_buffers(components):
        TrainStep(components, settings, rank=-1).time_backward(batch)


@contextlib.contextmanager
def _restored_buffers(components: AnyComponents, *failures: type[BaseException]) -> Iterator[None]:
    """Restore buffers after one of `failures` or, if none are given, always."""
    buffers = [buffer for buffer in components.model.buffers() if buffer.numel()]
    kept = [buffer.clone() for buffer in buffers]
    is_undone = not failures
    try:
        yield
    except failures:
        is_undone = True
        raise
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, kept) if is_undone else ():
                buffer.copy_(before)
