"""The engine of a sweep: trials that take their steps together, and join and leave between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.data.loader import Batch
from plait.fusion.errors import FusionError
from plait.sweeping.array_builder import ArrayBuilder
from plait.sweeping.engines.audited_step import AuditedTrial, most_at_once
from plait.sweeping.engines.batch_streams import next_batches, with_replacements
from plait.sweeping.engines.fused import Array, FusedArray, TrialInit, TrialTensors, rebuild_trial
from plait.sweeping.engines.unfused import UnfusedArray
from plait.sweeping.reasons import (
    NotFusedError,
    TooWideError,
    TrialsFailedError,
    fused_work,
    split_by_kind,
    why_failed,
)
from plait.sweeping.running_trial import RunningTrial


@dataclass(frozen=True)
class Joining:
    """A trial ready to join an array: how far it is, and its model and optimizer."""

    trial: RunningTrial
    entry: TrialInit


@dataclass(frozen=True)
class TrialsChange:
    """Let the trials at these places leave, and others join."""

    leaving: tuple[int, ...]
    joining: tuple[Joining, ...]


@dataclass(frozen=True)
class Admission:
    """Which trials join, wait for another array, can never be fused with those that join, or failed."""

    joining: tuple[Joining, ...]
    waiting: tuple[Joining, ...] = ()
    apart: tuple[Joining, ...] = ()
    # Why trials cannot train at all, by their numbers.
    failed: Mapping[int, str] = field(default_factory=dict)


class ArrayEngine:
    """Trains the trials of one array at a time, all of one group; without trials there is no array."""

    def __init__(self, builder: ArrayBuilder) -> None:
        self._builder = builder
        self.trials: list[RunningTrial] = []
        self.group = ""
        # Why trials that wait do not join the array there is, though it has room; and why some never do.
        self.closed = self._apart = ""
        self._array: Array | None = None
        # Losses since they were last given to the trials they belong to.
        self._losses: Tensor | None = None
        self._losses_of = 0
        # Steps of this worker with any trials, and at which of them each trial was audited last.
        self._steps = 0
        self._audited: dict[int, int] = {}

    @property
    def is_fused(self) -> bool:
        return self._array is not None and self._array.is_fused and len(self.trials) > 1

    @property
    def why(self) -> str:
        """What is worth saying of the array: why others do not join, or why it is not fused."""
        return self.closed or self._apart or self._builder.why_one_by_one(self.group)

    @property
    def free(self) -> int:
        """How many more trials could join."""
        return 0 if self.closed else self._builder.width(self.group) - len(self.trials)

    def step(self) -> None:
        """Take a step with every trial."""
        assert self._array is not None
        batches = next_batches([trial.stream for trial in self.trials])
        factors = [trial.lr_factor(trial.step) for trial in self.trials]
        audited = self._begin_audits(batches, factors)
        try:
            with self._one_trials_failure(), self._builder.fused_work(self.group):
                losses = self._array.step(batches, factors)
        except NotFusedError as failure:
            self._blame(failure, batches, factors)
            raise
        for place, alone in audited.items():
            self._end_audit(self.trials[place], alone, losses[place])
        self._steps += 1
        # Added up on the device: nobody waits for its values here.
        self._losses = losses if self._losses is None else self._losses + losses
        self._losses_of += 1
        for trial, batch in zip(self.trials, batches):
            trial.step += 1
            trial.moved = True
            trial.position = batch.after

    def _begin_audits(self, batches: Sequence[Batch], factors: Sequence[float]) -> dict[int, AuditedTrial]:
        """By place the trials by themselves, as they are now, that take the next step alone, too."""
        array = self._array
        newcomers = [place for place, trial in enumerate(self.trials) if trial.number not in self._audited]
        is_due = self._builder.is_audited(self._steps) or (newcomers and self._builder.audits_newcomers)
        if array is None or not array.is_fused or not is_due:
            return {}
        if not isinstance(array, FusedArray) or not self._builder.workers.is_alone:
            self._builder.say_once("audit: the steps of trials that several workers train are not audited")
            return {}
        if array.has_python_state:
            self._say_kept_in_python()
            return {}
        in_turn = sorted(range(len(self.trials)), key=lambda n: self._audited.get(self.trials[n].number, -1))
        places = newcomers[: most_at_once(array)] or in_turn[:1]
        return {place: AuditedTrial(array, place, batches[place], factors[place]) for place in places}

    def _end_audit(self, trial: RunningTrial, alone: AuditedTrial, loss: Tensor) -> None:
        self._audited[trial.number] = self._steps
        largest, found = alone.compare(loss)
        if alone.goes_by_python:
            self._say_kept_in_python()
        else:
            self._builder.note_audit(trial.number, trial.step + 1, alone.seconds, largest, found)

    def _say_kept_in_python(self) -> None:
        self._builder.say_once(
            "audit: the steps of fused trials whose forward keeps numbers in Python are not audited; "
            "keep such state in buffers"
        )

    @contextmanager
    def _one_trials_failure(self) -> Iterator[None]:
        """Within, what stops a trial that is by itself raises TrialsFailedError."""
        try:
            yield
        except (NotFusedError, TrialsFailedError):
            raise
        except Exception as failure:
            why = why_failed(failure) if len(self.trials) == 1 else None
            if why is None:
                raise
            raise TrialsFailedError({self.trials[0].number: why}) from failure

    def _blame(self, failure: NotFusedError, batches: Sequence[Batch], factors: Sequence[float]) -> None:
        """Raise TrialsFailedError where it is single trials that cannot take this step, fused or not."""
        array = self._array
        if isinstance(failure.__cause__, FusionError) or isinstance(failure, TooWideError):
            return
        if not isinstance(array, FusedArray):
            return
        reasons = {}
        for place, (trial, batch, factor) in enumerate(zip(self.trials, batches, factors)):
            try:
                UnfusedArray([rebuild_trial(array, place)]).step([batch], [factor])
            except Exception as own:  # a user's model can fail in any way
                if (why := why_failed(own)) is not None:
                    reasons[trial.number] = why
        if reasons:
            raise TrialsFailedError(reasons) from failure

    def collect_losses(self) -> None:
        """Give the losses since the last time to the trials they belong to."""
        if self._losses is not None:
            for trial, loss in zip(self.trials, self._losses.tolist()):
                trial.add_losses(loss, self._losses_of)
        self._losses, self._losses_of = None, 0

    def evaluate(self, places: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, of the trials at `places`."""
        assert self._array is not None
        with self._one_trials_failure(), self._builder.fused_work(self.group):
            return self._array.evaluate(places)

    def state(self, place: int) -> TrialTensors:
        """The tensors of the checkpoint of the trial at `place`."""
        assert self._array is not None
        with self._builder.fused_work(self.group):
            return self._array.tensors(place)

    def admit(self, joining: Sequence[Joining]) -> Admission:
        """Which of these trials may join the array that there is, or form a new one."""
        if self._array is None or not joining:
            return self._split(joining)
        try:
            entries = [each.entry for each in joining]
            self._check_entering(self._array, entries)
            with fused_work():
                numbers = [each.trial.number for each in joining]
                self._builder.verify_joining(self.group, self.trials[0].settings, entries, numbers)
        except TrialsFailedError as failure:
            others = [each for each in joining if each.trial.number not in failure.reasons]
            found = self.admit(others)
            return replace(found, failed={**found.failed, **failure.reasons})
        except NotFusedError as failure:
            found = self._split(joining, self._builder.first_model(self.trials[0].settings, joining[0].entry))
            if found.apart and found.joining:
                return replace(self.admit(found.joining), apart=found.apart)
            if found.apart:
                return found
            # The array's trials have changed in a way that others have not.
            self.closed = f"others wait until it has ended: {failure}"
            return Admission((), waiting=tuple(joining))
        return Admission(tuple(joining))

    def _check_entering(self, array: Array, entries: Sequence[TrialInit]) -> None:
        """Raise NotFusedError, on all workers, where one of them cannot let these trials join."""
        why = None
        try:
            with fused_work():
                array.check_entering(entries)
        except NotFusedError as failure:
            why = str(failure)
        if (why := self._builder.workers.any_of(why)) is not None:
            raise NotFusedError(why)

    def _split(self, joining: Sequence[Joining], first: nn.Module | None = None) -> Admission:
        """Those that can be fused with the first, or with the model `first`, apart from the others."""
        models = [each.entry.parts.model for each in joining]
        if (len(models) < 2 and first is None) or self._builder.is_pipelined:
            return Admission(tuple(joining))
        given = models if first is None else [first, *models]
        others, self._apart = split_by_kind(given)
        apart = [number - len(given) + len(models) for number in others]
        return Admission(
            tuple(each for number, each in enumerate(joining) if number not in apart),
            apart=tuple(joining[number] for number in apart),
        )

    def noise(self, place: int) -> GradientAverages | None:
        """What is known of the noise of a trial's gradients; None where it is not measured."""
        assert self._array is not None
        return self._array.noise(place)

    def apply(self, change: TrialsChange) -> None:
        """Let trials leave and admitted ones join; an array without trials is gone.

        NotFusedError where the trials must train one by one: all of `trials` are then to be given back.
        """
        self.collect_losses()
        for each in change.joining:
            self._audited.pop(each.trial.number, None)
        if self._array is None:
            self.trials = [each.trial for each in change.joining]
            with self._one_trials_failure():
                self._array = self._builder.make(
                    self.group,
                    [each.entry for each in change.joining],
                    [trial.number for trial in self.trials],
                )
        elif len(change.leaving) == len(self.trials) and not change.joining:
            self.close()
        elif change.leaving or change.joining:
            with self._builder.fused_work(self.group):
                self._array.change(change.leaving, [each.entry for each in change.joining])
            self.trials = with_replacements(
                self.trials, change.leaving, [each.trial for each in change.joining]
            )

    def close(self) -> None:
        """End the array; its trials are with it no more."""
        if self._array is not None:
            self._array.close()
        self._array, self.trials = None, []
        self.closed = self._apart = ""
        self._losses, self._losses_of = None, 0
