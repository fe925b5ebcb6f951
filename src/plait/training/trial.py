"""A trial: one setting of hyperparameters, and how far it has come."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from plait.adapt.changes import BatchSizeChange, ChangeSource, SavedSource
from plait.adapt.history import SignalHistory
from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.core.codec import decode
from plait.core.errors import ArtefactError, CheckpointError, JobError
from plait.data.loader import BatchStream
from plait.data.sampler import Position, steps_per_epoch
from plait.schema.settings import EarlyStopSettings, Mode, TrainSettings
from plait.training.change.batch_size import BatchSize, resumed
from plait.training.optimizers.lr_schedule import LrFactor

# More than any run takes.
UNKNOWN_STEPS = 1 << 62


@dataclass
class EarlyStopping:
    """The best value so far of the watched metric, and the number of evaluations without an improvement.

    `modes` says of each metric whether less or more is better.
    """

    rule: EarlyStopSettings | None = None
    modes: Mapping[str, Mode] = field(default_factory=dict)
    best: float | None = None
    without_gain: int = 0

    def update(self, metrics: Mapping[str, float]) -> None:
        """Count an evaluation that brought no gain."""
        if self.rule is None or not metrics:
            return
        value, mode = metrics[self.rule.metric], self.modes[self.rule.metric]
        if self.best is None or gain(mode, value, self.best) > self.rule.min_change:
            self.best, self.without_gain = value, 0
        else:
            self.without_gain += 1

    def should_stop(self) -> bool:
        return self.rule is not None and self.without_gain >= self.rule.patience


def gain(mode: Mode, value: float, before: float) -> float:
    """How much better `value` is than the best; NaN is worst."""
    if not math.isfinite(value):
        return -math.inf
    if not math.isfinite(before):
        return math.inf
    return before - value if mode == "min" else value - before


@contextlib.contextmanager
def reading_progress() -> Iterator[None]:
    """Raise CheckpointError where the progress that a checkpoint holds is not as expected."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ArtefactError) as failure:
        raise CheckpointError(f"its progress is damaged ({type(failure).__name__}: {failure})") from None


@dataclass(frozen=True)
class Due:
    """What is due for a trial after a step; `end` if it has finished or stops early."""

    evaluation: bool
    checkpoint: bool
    end: bool


@dataclass
class Trial:
    """One hyperparameter setting and its progress: what a checkpoint stores besides tensors.

    A run has one; those of a sweep have numbers.
    """

    settings: TrainSettings
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    number: int = 0
    step: int = 0
    position: Position = field(default_factory=Position)
    # The step and the metrics of the best checkpoint.
    best: dict[str, Any] | None = None
    # Whether the newest checkpoint was written before an evaluation that has not ended yet.
    owes_evaluation: bool = False
    # The step after which it ends, or, in some sweeps, is compared with others.
    until: int = UNKNOWN_STEPS
    # Whether it has advanced since what is due was last done.
    moved: bool = False
    # Its policies, the signals and gradient noise that they see, and the step after which they were asked.
    sources: Sequence[ChangeSource] = ()
    signals: SignalHistory = field(default_factory=SignalHistory)
    noise: GradientAverages = field(default_factory=GradientAverages)
    asked_at: int = -1
    # The learning rate's schedule, and the batches to come, once they are read.
    schedule: LrFactor = field(default=lambda step: 1.0)
    stream: BatchStream | None = None
    batch: BatchSize = field(init=False)

    def __post_init__(self) -> None:
        self.batch = BatchSize(self.settings.data.batch_size, self.settings.data.batch_size)

    def reset(self) -> None:
        """Reset to the first step, before a checkpoint is loaded."""
        self.step, self.position, self.best, self.moved = 0, Position(), None, False
        self.early_stopping = EarlyStopping(self.early_stopping.rule, self.early_stopping.modes)
        self.noise = GradientAverages()
        for source in self._saved_sources:
            source.load({})
        self.__post_init__()

    @property
    def _saved_sources(self) -> list[SavedSource]:
        return [source for source in self.sources if isinstance(source, SavedSource)]

    def change_batch(self, change: BatchSizeChange, workers: int) -> None:
        """Use another batch size over `workers` from the next step on; the order of samples is unchanged."""
        if change.batch_size < workers or not math.isfinite(change.lr_factor) or change.lr_factor <= 0:
            raise JobError(
                f"adapt: found {change} for {workers} workers; expected at least one sample a worker, and a "
                f"factor above 0 on the learning rate"
            )
        self.batch = self.batch.changed(change, self.step, by_samples=self.settings.epochs is not None)
        # Prefetched batches have the old size.
        self.stream = None

    def lr_factor(self, step: int) -> float:
        """The factor on the learning rate at a step: the schedule's times that of the batch size."""
        return self.schedule(self.batch.schedule_at(step)) * self.batch.lr_factor

    @property
    def has_reached(self) -> bool:
        """Whether it has finished, or reached the step at which trials are compared."""
        return self.step >= self.until

    @property
    def stops_early(self) -> bool:
        """Whether early stopping ends it."""
        return self.early_stopping.should_stop()

    def advance(self, steps: int, position: Position) -> None:
        """Record that `steps` steps were taken, up to `position`; only the loop calls it."""
        self.step, self.position, self.moved = self.step + steps, position, self.moved or steps > 0

    def is_time(self, every: int | None) -> bool:
        """Whether something that is done every `every` steps is due now."""
        return self.moved and every is not None and self.step % every == 0

    @property
    def periods(self) -> tuple[int | None, ...]:
        """The intervals, in steps, at which something is due."""
        return self.settings.evaluate.every_steps, self.settings.checkpoint.every_steps

    def steps_until_due(self) -> int:
        """Steps until something is due; 0 if the trial has finished."""
        if self.has_reached or self.stops_early:
            return 0
        left = [every - self.step % every for every in self.periods if every]
        return min([self.until - self.step, *left])

    def due(self) -> Due | None:
        """What is due now; None if nothing is."""
        ends = self.has_reached or self.stops_early
        if not ends and not any(self.is_time(every) for every in self.periods):
            return None
        settings = self.settings
        evaluation = self.is_time(settings.evaluate.every_steps)
        return Due(evaluation, self.is_time(settings.checkpoint.every_steps), ends)

    def progress(self, loss_scale: Mapping[str, Any], workers: int) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        return {
            "position": asdict(self.position),
            "seed": self.settings.seed,
            "best": self.best,
            "early_best": self.early_stopping.best,
            "evaluations_without_gain": self.early_stopping.without_gain,
            "loss_scale": dict(loss_scale),
            "optimizer": self.settings.optimizer.kind,
            "workers": workers,
            "batch": asdict(self.batch),
            "is_evaluation_due": self.owes_evaluation,
            "gradient_noise": self.noise.state(),
            "signals": self.signals.state(),
            "policies": [source.state() for source in self._saved_sources],
        }

    def load(self, step: int, progress: Mapping[str, Any]) -> None:
        """Go on from the progress that a checkpoint of `step` holds; CheckpointError changes nothing."""
        with reading_progress():
            position = decode(Position, progress["position"])
            best, early_best = progress["best"], progress["early_best"]
            without_gain = int(progress["evaluations_without_gain"])
            batch = decode(BatchSize, progress["batch"]) if "batch" in progress else self.batch
        self.step, self.position, self.best = step, position, best
        self.batch = resumed(batch, self.settings.data.batch_size)
        self.early_stopping.best, self.early_stopping.without_gain = early_best, without_gain
        self.owes_evaluation = bool(progress.get("is_evaluation_due"))

    def load_signals(self, progress: Mapping[str, Any]) -> None:
        """Go on with the signals, the noise and the policies' states of a checkpoint that was loaded."""
        with reading_progress():
            noise = decode(tuple[float, ...], progress.get("gradient_noise", ()))
            policies = list(progress.get("policies", ()))
        self.noise.load(noise)
        self.signals.load(progress.get("signals", {}))
        for source, values in zip(self._saved_sources, policies):
            source.load(values)


def total_steps(settings: TrainSettings, samples: int | None, step: int, position: Position) -> int:
    """How many steps the run has in all, when `step` steps have brought it to `position`.

    An epoch that yields no batch at all is refused. `samples` are those of an epoch; where they are not known
    and epochs are asked for, the answer is UNKNOWN_STEPS.
    """
    if samples is None:
        return UNKNOWN_STEPS if settings.steps is None else settings.steps
    size, keep = settings.data.batch_size, settings.data.last_batch == "keep"
    per_epoch = steps_per_epoch(samples, size, keep)
    if per_epoch == 0:
        raise JobError(
            f"data.batch_size: found {size}, but there are only {samples} samples and "
            f"data.last_batch is 'drop', so no batch is left; use a smaller batch or last_batch: keep"
        )
    if settings.epochs is None:
        assert settings.steps is not None
        return settings.steps
    whole_epochs = settings.epochs - position.epoch - 1
    rest = steps_per_epoch(samples - position.sample, size, keep)
    return step + max(0, whole_epochs * per_epoch + rest)


def present_steps(trial: Trial, samples: int | None) -> int:
    """How many steps a trial has in all, from its present position with its present batch size."""
    settings = trial.settings
    data = replace(settings.data, batch_size=trial.batch.size)
    return total_steps(replace(settings, data=data), samples, trial.step, trial.position)
