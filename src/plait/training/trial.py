"""A trial: one setting of hyperparameters, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.core.codec import decode
from plait.core.errors import ArtefactError, CheckpointError
from plait.data.sampler import Position
from plait.schema.settings import TrainSettings
from plait.training.batch_streams import BatchStream
from plait.training.change.batch_size import BatchSize, resumed
from plait.training.early_stopping import EarlyStopping
from plait.training.optimizers.lr_schedule import LrFactor


@dataclass
class Trial:
    """One setting of hyperparameters, and its progress: what a checkpoint says besides tensors.

    A run has one; those of a sweep have numbers.
    """

    settings: TrainSettings
    early_stopping: EarlyStopping
    number: int = 0
    step: int = 0
    position: Position = field(default_factory=Position)
    # The step and the metrics of the best checkpoint.
    best: dict[str, Any] | None = None
    # Whether the newest checkpoint was written before an evaluation that has not ended yet.
    owes_evaluation: bool = False
    # The learning rate's schedule, and the batches to come, once they are read.
    schedule: LrFactor = field(default=lambda step: 1.0)
    stream: BatchStream | None = None
    batch: BatchSize = field(init=False)

    def __post_init__(self) -> None:
        self.batch = BatchSize(self.settings.data.batch_size, self.settings.data.batch_size)

    def begin_anew(self) -> None:
        """Go back to the first step, before a checkpoint is read."""
        self.step, self.position, self.best = 0, Position(), None
        self.early_stopping = EarlyStopping(self.early_stopping.rule, self.early_stopping.modes)
        self.batch = BatchSize(self.settings.data.batch_size, self.settings.data.batch_size)

    def lr_factor(self, step: int) -> float:
        """The factor on the learning rate at a step: the schedule's times that of the batch size."""
        return self.schedule(self.batch.schedule_at(step)) * self.batch.lr_factor

    def is_time(self, every: int | None) -> bool:
        """Whether what is done every so many steps is due after this one."""
        return every is not None and self.step % every == 0

    def steps_until(self, *periods: int | None) -> int:
        """Steps until one of these periods is over."""
        return min(every - self.step % every for every in periods if every)

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
        }

    def load(self, step: int, progress: Mapping[str, Any]) -> None:
        """Go on from the progress that a checkpoint of `step` holds; CheckpointError changes nothing."""
        try:
            position = decode(Position, progress["position"])
            best, early_best = progress["best"], progress["early_best"]
            without_gain = int(progress["evaluations_without_gain"])
            batch = decode(BatchSize, progress["batch"]) if "batch" in progress else self.batch
        except (KeyError, TypeError, ValueError, ArtefactError) as failure:
            raise CheckpointError(f"its progress is damaged ({type(failure).__name__}: {failure})") from None
        self.step, self.position, self.best = step, position, best
        self.batch = resumed(batch, self.settings.data.batch_size)
        self.early_stopping.best, self.early_stopping.without_gain = early_best, without_gain
        self.owes_evaluation = bool(progress.get("is_evaluation_due"))
