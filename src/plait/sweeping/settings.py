"""What a sweep is told, as plain values: the job, what to try, and how to search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from plait.schema.settings import TrainSettings
from plait.sweeping.search.space import Dimension

SearchKind = Literal["grid", "random", "halving", "asha", "pbt"]
SEARCHES: tuple[SearchKind, ...] = ("grid", "random", "halving", "asha", "pbt")


@dataclass(frozen=True)
class SearchSettings:
    """How trials are chosen and compared.

    `trials` is how many to draw where they are drawn. One in `eta` goes on at each rung of halving and ASHA,
    the first being after `least_steps`; population-based training copies every `least_steps`. `metric` is
    what trials are compared by: auto is the evaluation's metric where there is one, else the loss.
    """

    kind: SearchKind = "grid"
    trials: int | None = None
    eta: int = 3
    least_steps: int | None = None
    metric: str = "auto"
    seed: int = 0


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
    def team_size(self) -> int:
        """How many workers train an array together."""
        return self.replicas if self.train.pipeline is None else len(self.train.pipeline.plan["stages"])
