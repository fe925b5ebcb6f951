"""What the leader of a team tells its followers, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from plait.runtime.checkpoint import Checkpoint
from plait.runtime.settings import TrainSettings


@dataclass(frozen=True)
class Newcomer:
    """A trial that joins: its settings, and its state where it does not begin."""

    settings: TrainSettings
    state: Checkpoint | None


@dataclass(frozen=True)
class Begin:
    """Make an array of these trials."""

    entering: tuple[Newcomer, ...]
    fused: bool


@dataclass(frozen=True)
class Change:
    """Let the trials at these places leave and others enter."""

    leaving: tuple[int, ...]
    entering: tuple[Newcomer, ...]


@dataclass(frozen=True)
class Step:
    """Take a step with these factors on the trials' learning rates."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class Evaluate:
    """Evaluate your share of the test split for the trials at these places."""

    places: tuple[int, ...]


@dataclass(frozen=True)
class Collect:
    """Let me have the state of the trial at this place."""

    place: int


@dataclass(frozen=True)
class Dissolve:
    """Let go of the array."""


@dataclass(frozen=True)
class End:
    """There is nothing left to do."""


Order = Begin | Change | Step | Evaluate | Collect | Dissolve | End
