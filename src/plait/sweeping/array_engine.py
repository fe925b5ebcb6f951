"""The engine of a sweep: trains an array of trials that join and leave between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from plait.data.loader import BatchStream
from plait.fusion.errors import FusionError
from plait.launcher.workers.worker_failure import as_loss
from plait.sweeping.array_builder import ArrayBuilder, ArrayTrainer
from plait.sweeping.engines.trial_audits import TrialAudits
from plait.sweeping.fusable import (
    NotFusedError,
    TooWideError,
    TrialsFailedError,
    fused_work,
    split_by_kind,
    why_failed,
)
from plait.sweeping.trials.running_trial import RunningTrial
from plait.training.batch_streams import with_replacements
from plait.training.checkpoint import EngineState
from plait.training.components import TrialInit
from plait.training.engine import IntervalResult
from plait.training.engines.train_step import step_alone
from plait.training.fused.fused_components import FusedComponents, rebuild_trial
from plait.training.monitoring.required_signals import decides_by_signals
from plait.training.monitoring.signals import step_signals
from plait.training.trial import Trial


@dataclass(frozen=True)
class JoiningTrial:
    """A trial ready to join an array: its progress, model and optimizer."""

    trial: RunningTrial
    entry: TrialInit


@dataclass(frozen=True)
class TrialsChange:
    """A change of an array: the slots of leaving trials, and the joining trials."""

    leaving: tuple[int, ...]
    joining: tuple[JoiningTrial, ...]


@dataclass(frozen=True)
class Admission:
    """Which trials join, wait for another array, can never be fused with those that join, or failed."""

    joining: tuple[JoiningTrial, ...]
    waiting: tuple[JoiningTrial, ...] = ()
    apart: tuple[JoiningTrial, ...] = ()
    # Why trials cannot train at all, by their numbers.
    failed: Mapping[int, str] = field(default_factory=dict)


class ArrayEngine:
    """Trains the trials of one array at a time, all of one group; without trials there is no array.

    The batches of a trial come from `feed`.
    """

    def __init__(self, builder: ArrayBuilder, feed: Callable[[Trial], BatchStream]) -> None:
        self._builder = builder
        self._feed = feed
        self.trials: list[RunningTrial] = []
        self.group = ""
        # Why waiting trials do not join the current array although it has room; and why some never can.
        self.closed = self._apart = ""
        self._engine: ArrayTrainer | None = None
        # Summed losses since the last `collect_losses`.
        self._losses: Tensor | None = None
        self._losses_of = 0
        # When the last step ended.
        self._since = 0.0
        self._audits = TrialAudits(builder.workers)

    @property
    def is_fused(self) -> bool:
        return len(self.trials) > 1

    @property
    def why(self) -> str:
        """Why other trials do not join the array, or why it is not fused."""
        return self.closed or self._apart or self._builder.why_one_by_one(self.group)

    @property
    def free(self) -> int:
        """How many more trials could join."""
        return 0 if self.closed else self._builder.width(self.group) - len(self.trials)

    def train(self, steps: int) -> IntervalResult:
        """Take steps with every trial; if one fails, `done` is the number of completed steps."""
        self._since = time.perf_counter()
        try:
            with self._one_trials_failure(), self._builder.fused_work(self.group):
                result = self._trainer.train(steps)
        except (NotFusedError, TrialsFailedError) as failure:
            if not self._trainer.is_in_step and failure.__cause__ is not None:
                self._blame_data(failure.__cause__)
            if isinstance(failure, NotFusedError):
                self._blame(failure)
            raise
        if self._builder.workers.is_pipelined:
            self._audits.count_steps(result.steps)
        elif self._builder.workers.averages:
            self._audits.report()
        if result.losses:
            losses = torch.tensor(result.losses, dtype=torch.float64)
            self._add_losses(result.steps, losses, result.steps)
        return result

    @property
    def done(self) -> int:
        """Steps done in the current or last interval."""
        return self._trainer.done

    def _add_losses(self, done: int, losses: Tensor, steps: int = 1) -> None:
        """Add the sums of the trials' losses in `steps` steps, the last of `done` in the interval."""
        # Summed on the device, without synchronization.
        self._losses = losses if self._losses is None else self._losses + losses
        self._losses_of += steps
        # Signals are numbers, so that the device is waited for.
        if steps and any(decides_by_signals(trial.settings) for trial in self.trials):
            self._add_signals(done, losses / steps, steps)

    def _add_signals(self, done: int, losses: Tensor, steps: int) -> None:
        """Add what the policies of each trial see of the last `steps` steps, which had these mean losses."""
        now, workers = time.perf_counter(), self._builder.workers.group.size
        step_s, self._since = (now - self._since) / steps, now
        for trial, loss in zip(self.trials, losses.tolist()):
            step, samples = trial.step + done, trial.batch.size
            trial.signals.add(step_signals(trial, trial.noise, workers, step, loss, samples, step_s))

    @property
    def _trainer(self) -> ArrayTrainer:
        assert self._engine is not None
        return self._engine

    @property
    def _fused(self) -> FusedComponents | None:
        """What this worker holds of the fused trials; None if the array has none."""
        components = None if self._engine is None else self._engine.components
        return components if isinstance(components, FusedComponents) else None

    @contextmanager
    def _one_trials_failure(self) -> Iterator[None]:
        """Turn failures in the body into TrialsFailedError if the array has one trial."""
        try:
            yield
        except (NotFusedError, TrialsFailedError):
            raise
        except Exception as failure:
            is_loss = not self._builder.workers.group.is_alone and as_loss(failure) is not None
            why = why_failed(failure) if len(self.trials) == 1 and not is_loss else None
            if why is None:
                raise
            raise TrialsFailedError({self.trials[0].number: why}) from failure

    def _blame_data(self, failure: BaseException) -> NoReturn:
        """Raise TrialsFailedError if samples of data that other trials do not have could not be read."""
        why = why_failed(failure) if isinstance(failure, Exception) else None
        streams = [trial.stream for trial in self.trials]
        numbers = [t.number for t, stream in zip(self.trials, streams) if stream and stream.has_failed]
        if why is None or not numbers or not self._builder.workers.settings.has_unlike_data:
            raise failure from None
        raise TrialsFailedError(dict.fromkeys(numbers, why)) from failure

    def _blame(self, failure: NotFusedError) -> None:
        """Raise TrialsFailedError if single trials fail in this step even alone."""
        array = self._fused
        if isinstance(failure.__cause__, FusionError) or isinstance(failure, TooWideError):
            return
        if array is None:
            return
        reasons = {}
        for slot, (trial, batch, factor) in enumerate(zip(self.trials, *self._trainer.in_progress)):
            try:
                step_alone(rebuild_trial(array, slot), batch, factor)
            except Exception as error:  # a user's model can fail in any way
                if (why := why_failed(error)) is not None:
                    reasons[trial.number] = why
        if reasons:
            raise TrialsFailedError(reasons) from failure

    def collect_losses(self) -> None:
        """Add the losses since the last call to their trials."""
        if self._losses is not None:
            for trial, loss in zip(self.trials, self._losses.tolist()):
                trial.add_losses(loss, self._losses_of)
        self._losses, self._losses_of = None, 0

    def evaluate(self, slots: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, of the trials in `slots`."""
        with self._one_trials_failure(), self._builder.fused_work(self.group):
            return self._trainer.evaluate(slots)

    def state(self, slot: int) -> EngineState | None:
        """The state of the trial in `slot`, on the group's first worker."""
        with self._builder.fused_work(self.group):
            return self._trainer.state(slot)

    def admit(self, joining: Sequence[JoiningTrial]) -> Admission:
        """Which of these trials may join the current array, or form a new one."""
        if self._engine is None or not joining:
            return self._split(joining)
        try:
            entries = [each.entry for each in joining]
            self._check_entering(entries)
            if self._builder.width(self.group) > 1:
                with fused_work():
                    numbers, first = [each.trial.number for each in joining], self.trials[0].settings
                    self._builder.verifier.verify_joining(self.group, first, entries, numbers)
        except TrialsFailedError as failure:
            others = [each for each in joining if each.trial.number not in failure.reasons]
            admission = self.admit(others)
            return replace(admission, failed={**admission.failed, **failure.reasons})
        except NotFusedError as failure:
            admission = self._split(
                joining, self._builder.verifier.first_model(self.trials[0].settings, joining[0].entry)
            )
            if admission.apart and admission.joining:
                return replace(self.admit(admission.joining), apart=admission.apart)
            if admission.apart:
                return admission
            # The trials of the array have changed during training so that new ones no longer fit.
            self.closed = f"others wait until it has ended: {failure}"
            return Admission((), waiting=tuple(joining))
        return Admission(tuple(joining))

    def _check_entering(self, entries: Sequence[TrialInit]) -> None:
        """Raise NotFusedError on all workers if these trials cannot join on one of them."""
        why = None
        try:
            with fused_work():
                self._trainer.check_entering(entries)
        except NotFusedError as failure:
            why = str(failure)
        if (why := self._builder.workers.group.any_of(why)) is not None:
            raise NotFusedError(why)

    def _split(self, joining: Sequence[JoiningTrial], first: nn.Module | None = None) -> Admission:
        """Split trials into those that can be fused with the first, or with the model `first`, and others."""
        models = [each.entry.components.model for each in joining]
        if (len(models) < 2 and first is None) or self._builder.workers.is_pipelined:
            return Admission(tuple(joining))
        given = models if first is None else [first, *models]
        others, self._apart = split_by_kind(given)
        apart = [number - len(given) + len(models) for number in others]
        return Admission(
            tuple(each for number, each in enumerate(joining) if number not in apart),
            apart=tuple(joining[number] for number in apart),
        )

    def apply(self, change: TrialsChange) -> None:
        """Remove and add trials; an array without trials is closed.

        On NotFusedError, which means that trials must train one by one, the caller returns all of `trials`.
        """
        self.collect_losses()
        for each in change.joining:
            self._audits.forget(each.trial.number)
        entering = [each.entry for each in change.joining]
        joining = [each.trial for each in change.joining]
        if self._engine is None:
            self.trials = joining
            with self._one_trials_failure():
                self._engine = self._builder.make(
                    self.group, entering, list(joining), self._feed, self._add_losses, self._audits
                )
            if self._builder.workers.is_pipelined and self._builder.width(self.group) == 1:
                # Its stages are those of this trial.
                self.closed = self._builder.why_one_by_one(self.group)
        elif len(change.leaving) == len(self.trials) and not change.joining:
            self.close()
        elif change.leaving or change.joining:
            trials = with_replacements(self.trials, change.leaving, joining)
            with self._builder.fused_work(self.group):
                self._engine.change_trials(change.leaving, entering, list(trials))
            self.trials = trials
        self._audits.array, self._audits.trials = self._fused, self.trials

    def close(self) -> None:
        """Close the array and remove its trials."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self.trials = None, []
        self.closed = self._apart = ""
        self._losses, self._losses_of = None, 0
