"""The batch size of a run that may change, and the learning rate that goes with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.adapt.changes import BatchSizeChange


@dataclass(frozen=True)
class BatchSize:
    """Samples of a step over all workers: `size` now, `job_size` as the job file says.

    `lr_factor` is a factor on the learning rate that the schedule gives. The schedule stood at
    `schedule_step` when `since` steps were done, and goes on by `pace` a step: in a run of epochs it follows
    the samples, so that it ends with the last one, whatever the batches were.
    """

    size: int
    job_size: int
    lr_factor: float = 1.0
    since: int = 0
    schedule_step: float = 0.0
    pace: float = 1.0

    def schedule_at(self, step: int) -> int:
        """The schedule's step when `step` steps are done."""
        if self.pace == 1.0 and self.schedule_step == self.since:
            return step
        return round(self.schedule_step + (step - self.since) * self.pace)

    def changed(self, change: BatchSizeChange, step: int, by_samples: bool) -> BatchSize:
        """From step `step` on; `by_samples` where the schedule follows the samples."""
        return replace(
            self,
            size=change.batch_size,
            lr_factor=change.lr_factor,
            since=step,
            schedule_step=self.schedule_step + (step - self.since) * self.pace,
            pace=change.batch_size / self.job_size if by_samples else 1.0,
        )


def resumed(kept: BatchSize, job_size: int) -> BatchSize:
    """The batch size to go on with from a checkpoint: what it was, unless the job file now says another."""
    return kept if kept.job_size == job_size else BatchSize(job_size, job_size)
