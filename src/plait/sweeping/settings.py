"""The settings of a sweep, as plain values: the job, what to try, and how to search."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.launch.messages import RunRequest
from plait.schema.settings import SearchSettings, TrainSettings
from plait.sweeping.search.space import Dimension


@dataclass(frozen=True)
class SweepSettings:
    """One sweep: `train` with each trial's values over it; `width` trials an array, else as many as pay.

    Each array is trained by `replicas` workers together, or, where `train` has a pipeline, by as many as that
    has stages.
    """

    train: TrainSettings
    over: tuple[Dimension, ...]
    search: SearchSettings = field(default_factory=SearchSettings)
    width: int | None = None
    replicas: int = 1

    @property
    def workers_per_array(self) -> int:
        """How many workers train an array together."""
        return len(self.train.stages.plan.stages) if self.train.in_stages else self.replicas


@dataclass(frozen=True, kw_only=True)
class SweepRequest(RunRequest):
    """A sweep, as its workers and its coordinator receive it."""

    settings: SweepSettings
