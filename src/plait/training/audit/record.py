"""The results of a run's audits: its figures, and the message where a step differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.core.errors import PlaitError
from plait.core.run_events import Audited
from plait.core.units import count_of
from plait.training.run_record import RunRecorder
from plait.verification.audit import Rounding
from plait.verification.compare import Difference
from plait.verification.replay import PlainModel

# Differences that a message names.
_NAMED = 3


class DifferenceError(PlaitError):
    """A step of the run differs from the same step in plain PyTorch."""


def findings(largest: float, differences: Sequence[Difference], unseen: Sequence[str]) -> list[Any]:
    """What one worker found in an audit, as workers exchange it.

    `largest` is the largest difference, relative to the largest value of its kind. `unseen` names
    state that forward may depend on and no audit can read.
    """
    return [largest, [str(each) for each in differences], list(unseen[:_NAMED])]


@dataclass
class AuditRecord:
    """The audits of a run so far. `stops` says whether a difference ends it, and `difference` which did."""

    metrics: RunRecorder
    stops: bool
    steps: int = 0
    largest: float = 0.0
    difference: str | None = None
    # Attributes that differ, and by which forward was seen not to go; and what rounding was seen to do.
    harmless: set[str] = field(default_factory=set)
    rounding: Rounding = field(default_factory=Rounding)
    # The buffers that were seen not to be written for single samples.
    shared_buffers: set[str] = field(default_factory=set)
    # The model of the audits, while one follows the other.
    reference: PlainModel | None = None
    # What stands for the first samples as they were before the first step, as long as they are the same; and
    # the step after which they were last read again.
    samples: int | None = None
    looked: int = 0
    _warned: set[str] = field(default_factory=set)

    def add(self, step: int, seconds: float, workers: Sequence[Sequence[Any]], advice: str) -> None:
        """Take down what all workers found in step `step`, in the order of their ranks."""
        self.steps += 1
        self.largest = max([self.largest, *(largest for largest, _, _ in workers)])
        texts = _by_worker([differences for _, differences, _ in workers])
        unseen = sorted({name for _, _, names in workers for name in names})
        self.metrics.record(Audited(step, round(seconds, 6), self.largest, tuple(texts[:_NAMED])))
        if texts and unseen:
            self.say(
                f"audit: {_differs(step, texts)}; but the step has {', '.join(unseen)}, which no audit can "
                f"read, so that it may be the audit that differs; keep such state in buffers"
            )
        elif texts:
            self._judge(_differs(step, texts), advice)

    def add_difference(self, step: int, what: str, advice: str) -> None:
        """Take down a difference that all workers know of."""
        self._judge(f"step {step}: {what}", advice)

    def _judge(self, text: str, advice: str) -> None:
        if self.stops:
            self.difference = f"{text}; {advice}"
        else:
            self.say(f"audit: {text}; {advice}")

    def say(self, message: str) -> None:
        """Warn the user, of the same thing once."""
        if message not in self._warned:
            self._warned.add(message)
            self.metrics.warn(message)


def _differs(step: int, texts: Sequence[str]) -> str:
    more = f"; and {count_of(len(texts) - _NAMED, 'more difference')}" if len(texts) > _NAMED else ""
    return f"step {step} is not what plain PyTorch does: {'; '.join(texts[:_NAMED])}{more}"


def _by_worker(differences: Sequence[Sequence[str]]) -> list[str]:
    """Each difference once, with the workers that see it where others do not."""
    ranks: dict[str, list[str]] = {}
    for rank, texts in enumerate(differences):
        for each in texts:
            ranks.setdefault(each, []).append(str(rank))
    workers = len(differences)
    return [
        each if len(seen_by) == workers else f"{each} (worker {', '.join(seen_by)})"
        for each, seen_by in ranks.items()
    ]
