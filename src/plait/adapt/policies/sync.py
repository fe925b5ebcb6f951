"""Adaptive sync: partial reduce while there are stragglers, all-reduce while there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from plait.adapt.changes import SyncChange
from plait.adapt.monitors.step_times import stragglers
from plait.adapt.policies.policy import Decision, Proposal
from plait.core.errors import JobError
from plait.core.run_events import Signals

ALL_REDUCE = "all-reduce"


@dataclass(frozen=True)
class SyncState:
    """The number of consecutive signals in favour of a change, and the step of the last change."""

    in_a_row: int = 0
    since: int = 0


@dataclass(frozen=True)
class AdaptiveSync:
    """Switch to the sync `to`, with these `options`, if there is a straggler, and back if there is none.

    A straggler takes `slow` times the median of all workers for its share of a step, for `confirm`
    consecutive signals. To switch back, no worker may take more than `calm` times the median for
    `confirm_calm` consecutive signals. `calm` is below `slow`, so that a worker near the threshold does not
    cause repeated switches.
    """

    to: str = "partial-reduce"
    options: Mapping[str, Any] = field(default_factory=dict)
    slow: float = 1.5
    calm: float = 1.2
    confirm: int = 5
    confirm_calm: int = 3
    state_type: ClassVar[type | None] = SyncState

    def __post_init__(self) -> None:
        if not 1 <= self.calm <= self.slow or min(self.confirm, self.confirm_calm) < 1:
            raise JobError(
                f"adapt: sync found slow {self.slow}, calm {self.calm}, confirm {self.confirm} and "
                f"confirm_calm {self.confirm_calm}; expected 1 <= calm <= slow and counts of 1 or more"
            )

    def decide(self, signals: Sequence[Signals], state: SyncState | None) -> Decision:
        now, state = signals[-1], state or SyncState()
        if not now.work_s or now.step <= state.since:
            return Decision(state=state)
        apart = now.sync != ALL_REDUCE
        late = stragglers(now.work_s, self.calm if apart else self.slow)
        speaks = not late if apart else bool(late)
        in_a_row = state.in_a_row + 1 if speaks else 0
        if in_a_row < (self.confirm_calm if apart else self.confirm):
            return Decision(state=SyncState(in_a_row, state.since))
        if apart:
            why = f"no worker took {self.calm:g} times the median for {in_a_row} intervals"
            proposal = Proposal(SyncChange(ALL_REDUCE), why)
        else:
            which = ", ".join(map(str, late))
            why = f"worker {which} took {self.slow:g} times the median or more for {in_a_row} steps"
            proposal = Proposal(SyncChange(self.to, self.options), why)
        return Decision((proposal,), SyncState(0, now.step + 1))
