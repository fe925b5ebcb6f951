"""Checks that a run can resume from a checkpoint with its present settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.core.errors import JobError
from plait.data.sampler import Position
from plait.schema.settings import TrainSettings


def check_order(
    progress: Mapping[str, Any], position: Position, settings: TrainSettings, samples: int | None
) -> None:
    """Refuse to resume in the middle of an epoch if the order of samples has changed."""
    if position.sample == 0:
        return
    now = {"seed": settings.seed, "data.shuffle": settings.data.shuffle, "samples": samples}
    for key, value in now.items():
        before = progress.get(key.rpartition(".")[2], value)
        if before != value:
            raise JobError(
                f"{key}: found {value!r}, but the run was trained with {before!r}, and it is in the middle "
                f"of an epoch: samples would be repeated and left out; resume with {before!r}, or start a "
                f"new run"
            )


def check_end(step: int, position: Position, settings: TrainSettings) -> None:
    """Refuse to resume a run that is already beyond its end."""
    if settings.steps is not None and step > settings.steps:
        raise JobError(
            f"steps: found {settings.steps}, but the run has made {step} steps; give {step} or more, or "
            f"start a new run"
        )
    epochs = settings.epochs
    if epochs is not None and (position.epoch, position.sample) > (epochs, 0):
        part = " and a part of the next" if position.sample else ""
        raise JobError(
            f"epochs: found {epochs}, but the run has come through {position.epoch}{part}; give as many or "
            f"more, or start a new run"
        )
