"""Step-based changes: a table of changes by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from plait.adapt.changes import BatchSizeChange, Change, SyncChange, TopologyChange, WorkersChange
from plait.adapt.policies.policy import Decision, Proposal
from plait.core.codec import decode
from plait.core.errors import ArtefactError, JobError
from plait.core.names import did_you_mean
from plait.core.run_events import Signals
from plait.core.shown import shown

# The field that identifies the kind of change of an entry.
_BY_FIELD: Mapping[str, type] = {
    "batch_size": BatchSizeChange,
    "topology": TopologyChange,
    "workers": WorkersChange,
    "sync": SyncChange,
}


def read_change(entry: Mapping[str, Any], where: str) -> Change:
    """The change described by an entry such as `{batch_size: 128, lr_factor: 2}`."""
    kinds = [kind for key, kind in _BY_FIELD.items() if key in entry]
    if len(kinds) != 1:
        near = did_you_mean(next(iter(entry), ""), _BY_FIELD)
        raise JobError(f"{where}: found {shown(dict(entry))}, expected one of {', '.join(_BY_FIELD)}{near}")
    try:
        change: Change = decode(kinds[0], entry, where)
    except ArtefactError as failure:
        raise JobError(str(failure)) from None
    if isinstance(change, BatchSizeChange):
        has_rate = math.isfinite(change.lr_factor) and change.lr_factor > 0
        if change.batch_size < 1 or not has_rate:
            raise JobError(
                f"{where}: found {shown(dict(entry))}, expected a batch_size of 1 or more and an lr_factor "
                f"above 0"
            )
    return change


@dataclass(frozen=True)
class StepBased:
    """Apply each change of `changes` after its step: {100: {batch_size: 128, lr_factor: 2.0}}."""

    changes: Mapping[int, Mapping[str, Any]]
    state_type: ClassVar[type | None] = None

    def __post_init__(self) -> None:
        for step, entry in self.changes.items():
            if step < 0:
                raise JobError(f"adapt.changes: found step {step}, expected 0 or more")
            read_change(entry, f"adapt.changes.{step}")

    def next_due(self, step: int) -> int | None:
        """The first step after `step` that has a change."""
        return min((at for at in self.changes if at > step), default=None)

    def at(self, step: int) -> list[Proposal]:
        """The change that is due after `step` steps, if any."""
        entry = self.changes.get(step)
        return [Proposal(read_change(entry, f"adapt.changes.{step}"), f"step {step}")] if entry else []

    def decide(self, signals: Sequence[Signals], state: Any) -> Decision:
        """Decide by signals, which are a step late; a loop calls `at` instead, which is exact."""
        return Decision(tuple(self.at(signals[-1].step)))
