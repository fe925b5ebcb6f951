"""What the audits of a run came to: the figures of its result, and the words where a step differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.core.errors import PlaitError
from plait.core.run_events import Audited
from plait.training.metrics import MetricsLogger
from plait.verification.compare import Difference

# Differences that a message names.
_NAMED = 3


class DifferenceError(PlaitError):
    """A step of the run was not what plain PyTorch does."""


@dataclass(frozen=True)
class Findings:
    """What one worker found in an audit.

    `largest` is the largest difference, relative to the largest value of its kind. `unseen` names what
    forward may go by and no audit can read.
    """

    largest: float = 0.0
    differences: Sequence[Difference] = ()
    unseen: Sequence[str] = ()

    def plain(self) -> list[object]:
        """In the form in which workers exchange it."""
        return [self.largest, [str(each) for each in self.differences], list(self.unseen[:_NAMED])]


@dataclass
class AuditRecord:
    """The audits of a run so far. `stops` says whether a difference ends it, and `difference` which did."""

    metrics: MetricsLogger
    stops: bool
    steps: int = 0
    largest: float = 0.0
    difference: str | None = None
    # Attributes that differ, and by which forward was seen not to go.
    harmless: set[str] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)

    def add(self, step: int, seconds: float, workers: Sequence[Sequence[object]], advice: str) -> None:
        """Take down what all workers found in step `step`, in the order of their ranks."""
        found = [decode_findings(each) for each in workers]
        self.steps += 1
        self.largest = max([self.largest, *(largest for largest, _, _ in found)])
        words = [f"{each} (worker {rank})" for rank, (_, names, _) in enumerate(found) for each in names]
        unseen = sorted({name for _, _, names in found for name in names})
        self.metrics.note(Audited(step, round(seconds, 6), self.largest, tuple(words[:_NAMED])))
        if not words:
            return
        more = f", and {len(words) - _NAMED} more differences" if len(words) > _NAMED else ""
        text = f"step {step} is not what plain PyTorch does: {'; '.join(words[:_NAMED])}{more}"
        if unseen:
            self.say(
                f"audit: {text}; but forward keeps {', '.join(unseen)}, which no audit can read, so that the "
                f"difference may be the audit's; keep such state in buffers, and it can tell"
            )
        elif self.stops:
            self.difference = f"{text}; {advice}"
        else:
            self.say(f"audit: {text}; {advice}")

    def say(self, words: str) -> None:
        """Warn the user, of the same thing once."""
        if words not in self._said:
            self._said.add(words)
            self.metrics.warn(words)


def decode_findings(plain: Sequence[object]) -> tuple[float, list[str], list[str]]:
    largest, differences, unseen = plain
    assert isinstance(largest, (int, float))
    assert isinstance(differences, list)
    assert isinstance(unseen, list)
    return float(largest), differences, unseen
