"""The settings of a sweep, as plain values: the job, what to try, and how to search."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.launcher.messages import RunRequest
from plait.schema.settings import SearchSettings, TrainSettings
from plait.sweeping.search.space import Dimension

# Of the file that has them.
KIND, VERSION = "sweep", 1


@dataclass(frozen=True)
class SweepSettings:
    """One sweep: `train` with each trial's values over it; `width` trials an array, else as many as pay.

    Each array is trained by `replicas` workers together or, if `train` has a pipeline, by `replicas` times
    the workers of its plan. `base` tells the weights in the folder of the model, if it has one, from others.
    """

    train: TrainSettings
    over: tuple[Dimension, ...]
    search: SearchSettings = field(default_factory=SearchSettings)
    width: int | None = None
    replicas: int = 1
    base: str | None = None

    @property
    def workers_per_array(self) -> int:
        """How many workers train an array together."""
        return self.replicas * (self.train.stages.plan.devices_used if self.train.in_stages else 1)

    @property
    def has_unlike_data(self) -> bool:
        """Whether trials read other data than each other."""
        return any(each.key.startswith("data.") and each.key != "data.batch_size" for each in self.over)

    @property
    def keeps_adapters(self) -> bool:
        """Whether the adapters of all trials are kept: each has separate data, so that none is the best."""
        return self.train.model.lora_array is not None and self.has_unlike_data


@dataclass(frozen=True, kw_only=True)
class SweepRequest(RunRequest):
    """A sweep, as its workers and its coordinator receive it."""

    settings: SweepSettings
