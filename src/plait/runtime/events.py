"""The events of a training run; docs/events.md describes each field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.core.events import Event


@dataclass(frozen=True)
class RunStarted(Event):
    """A run, or a resumed part of one, begins; `step` steps were done before."""

    name: str
    model: str
    parameters: int
    workers: int
    device: str
    precision: str
    samples: int
    batch_size: int
    steps: int
    step: int
    seed: int
    torch: str


@dataclass(frozen=True)
class Step(Event):
    """The steps since the event before: the last one's number, their mean loss, samples and seconds."""

    step: int
    epoch: int
    loss: float | None
    lr: float
    samples: int
    seconds: float


@dataclass(frozen=True)
class Evaluated(Event):
    """The model after `step` steps on the test split."""

    step: int
    metrics: Mapping[str, float | None]
    samples: int
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint of the state after `step` steps lies in the run folder."""

    step: int
    seconds: float
    best: bool


@dataclass(frozen=True)
class CheckpointRefused(Event):
    """A checkpoint could not be used on resume, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class RunEnded(Event):
    """The run ended: `reason` is finished, stopped or early-stop."""

    step: int
    reason: str
    seconds: float
    samples_per_s: float


@dataclass(frozen=True)
class Operations(Event):
    """What a worker of a pipeline did up to `step`, one place in each list for each operation.

    `letters` has one for each: F forward, B backward, I and W the halves of a split backward, U update
    (whose `microbatches` holds the version it wrote). Times are seconds since the epoch, after the input
    had arrived and before the output was taken.
    """

    step: int
    letters: str
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
