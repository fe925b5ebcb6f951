"""What a policy is: a pure function from signals, and from what it has noted before, to changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plait.adapt.changes import Change
from plait.core.run_events import Signals


@dataclass(frozen=True)
class Proposal:
    """A change that a policy asks for, and why, in words."""

    change: Change
    why: str


@dataclass(frozen=True)
class Decision:
    """What a policy asks for now, and what it is to be given when it is asked next.

    `state` is a frozen dataclass or plain values: checkpoints hold it.
    """

    proposals: tuple[Proposal, ...] = ()
    state: Any = None


class Policy(Protocol):
    """Decides by signals and its own state; the first worker asks it, for all."""

    # What `state` is made from when a checkpoint is read; None for plain values.
    state_type: type | None

    def decide(self, signals: Sequence[Signals], state: Any) -> Decision:
        """What to change, by the newest `signals` (oldest first, never empty); the first `state` is None."""


def replay(policy: Policy, signals: Sequence[Signals], kept: int = 200) -> list[tuple[int, Proposal]]:
    """What a policy would have asked for, and at which step, had it seen these signals one by one.

    Nothing is applied, so signals after a change are those of a run that did not change.
    """
    found: list[tuple[int, Proposal]] = []
    state: Any = None
    for end in range(1, len(signals) + 1):
        decision = policy.decide(signals[max(0, end - kept) : end], state)
        state = decision.state
        found += [(signals[end - 1].step, proposal) for proposal in decision.proposals]
    return found


def simulate(
    policy: Policy, next_signals: Callable[[list[Proposal]], Signals | None], kept: int = 200
) -> list[tuple[int, Proposal]]:
    """As `replay`, where the next signals depend on all that was asked for so far; None ends it."""
    found: list[tuple[int, Proposal]] = []
    signals: list[Signals] = []
    state: Any = None
    while (now := next_signals([proposal for _, proposal in found])) is not None:
        signals = [*signals, now][-kept:]
        decision = policy.decide(signals, state)
        state = decision.state
        found += [(now.step, proposal) for proposal in decision.proposals]
    return found
