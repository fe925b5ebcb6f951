"""What callbacks are given: one small record for each event of a run, or of a trial of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core import run_events
from plait.core.codec import encode
from plait.core.events import Event
from plait.schema.results import numbers


@dataclass(frozen=True)
class StartRecord:
    """A run, or a trial of a sweep, begins or goes on after `step` steps.

    `folder` is that of the run, or of the sweep. `settings` are those of the job as plain values, a trial's
    with its own `values` in them, by their keys in the job.
    """

    name: str
    folder: Path
    step: int
    settings: Mapping[str, Any]
    trial: int | None = None
    values: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """The name of the run's folder, and the number of the trial."""
        return self.folder.name if self.trial is None else f"{self.folder.name}-trial-{self.trial:04d}"


@dataclass(frozen=True)
class StepRecord:
    """The steps since the record before: the number of the last one and their mean loss.

    A trial of a sweep has no more than that; `samples` are those of all workers.
    """

    step: int
    loss: float
    epoch: int | None = None
    lr: float | None = None
    samples: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """Loss and metrics on the test split after `step` steps."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointRecord:
    """The checkpoint of `step` was written to `path`; `best` if an evaluation has shown it to be the best.

    A trial of a sweep keeps one, until its next or until it ends; that of the best trial is then the sweep's.
    """

    step: int
    path: Path
    best: bool


@dataclass(frozen=True)
class ChangeRecord:
    """The run was changed after `step` steps: the kind of change, its values, who asked for it, and why."""

    step: int
    kind: str
    values: Mapping[str, Any]
    by: str
    why: str


@dataclass(frozen=True)
class EndRecord:
    """The run, or the trial, has ended after `step` steps.

    `reason` is finished, stopped, early-stop, diverged or failed; of a trial also dropped; of a worker that
    leaves an elastic run left: another worker goes on.
    """

    step: int
    reason: str


Record = StepRecord | EvaluationRecord | CheckpointRecord | ChangeRecord | EndRecord


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def record_of(event: Event, checkpoints: Path) -> tuple[str, Record] | None:
    """The method of a callback that an event is for, and its record; None where it is for none."""
    match event:
        case run_events.Step(step, epoch, loss, lr, samples, seconds):
            return "on_step", StepRecord(step, _number(loss), epoch, lr, samples, seconds)
        case run_events.TrialStep(_, step, loss):
            return "on_step", StepRecord(step, _number(loss))
        case run_events.Evaluated(step, metrics) | run_events.TrialEvaluated(_, step, metrics):
            return "on_evaluate", EvaluationRecord(step, numbers(metrics))
        case run_events.CheckpointSaved(step, _, best):
            return "on_checkpoint", CheckpointRecord(step, checkpoints / f"step-{step:09d}", best)
        case run_events.TrialSaved(_, step):
            return "on_checkpoint", CheckpointRecord(step, checkpoints / f"step-{step:09d}", False)
        case run_events.Changed(step, kind, change, by, why):
            return "on_change", ChangeRecord(step, kind, change, by, why)
        case run_events.WorkersChanged(step=step, by=by, why=why):
            names = ("members", "joined", "left", "lost")
            values = {name: encode(getattr(event, name)) for name in names}
            return "on_change", ChangeRecord(step, "WorkersChange", values, by, why)
        case run_events.RunEnded(step, reason) | run_events.TrialEnded(_, step, reason):
            return "on_end", EndRecord(step, reason)
    return None
