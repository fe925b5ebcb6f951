"""The batch size of a run, which may change, and the learning rate for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from plait.adapt.changes import BatchSizeChange


@dataclass(frozen=True)
class BatchSize:
    """Samples of a step over all workers: `size` now, `job_size` as the job file says.

    `lr_factor` multiplies the learning rate of the schedule. The schedule was at `schedule_step` after
    `since` steps and advances by `pace` per step. In a run of epochs it follows the samples, so that it ends
    with the last sample at any batch size.
    """

    size: int
    job_size: int
    lr_factor: float = 1.0
    since: int = 0
    schedule_step: float = 0.0
    pace: float = 1.0

    def schedule_at(self, step: int) -> int:
        """The step of the schedule after `step` steps of training."""
        if self.pace == 1.0 and self.schedule_step == self.since:
            return step
        return round(self.schedule_step + (step - self.since) * self.pace)

    def step_at(self, scheduled: int) -> int:
        """The first step of training after which the schedule is at `scheduled`."""
        return self.since + math.ceil((scheduled - self.schedule_step) / self.pace - 1e-9)

    @property
    def is_changed(self) -> bool:
        return self != BatchSize(self.job_size, self.job_size)

    def changed(self, change: BatchSizeChange, step: int, by_samples: bool) -> BatchSize:
        """The batch size from step `step` on; `by_samples` if the schedule follows the samples."""
        return replace(
            self,
            size=change.batch_size,
            lr_factor=change.lr_factor,
            since=step,
            schedule_step=self.schedule_step + (step - self.since) * self.pace,
            pace=change.batch_size / self.job_size if by_samples else 1.0,
        )


def resumed(kept: BatchSize, job_size: int) -> BatchSize:
    """The batch size to resume with: that of the checkpoint, unless the job file has changed."""
    return kept if kept.job_size == job_size else BatchSize(job_size, job_size)
