"""The interface of a policy: a pure function from signals and its previous state to changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plait.adapt.changes import Change
from plait.adapt.history import KEPT
from plait.core.run_events import Signals


@dataclass(frozen=True)
class Proposal:
    """A change that a policy requests, and the reason as text."""

    change: Change
    why: str


@dataclass(frozen=True)
class Decision:
    """The requested changes, and the state for the next call.

    `state` is a frozen dataclass or plain values; it is saved in checkpoints.
    """

    proposals: tuple[Proposal, ...] = ()
    state: Any = None


class Policy(Protocol):
    """Decides by signals and its state; called on the first worker, for all."""

    # The class of `state`, for reading checkpoints; None for plain values.
    state_type: type | None

    def decide(self, signals: Sequence[Signals], state: Any) -> Decision:
        """What to change, given recent `signals` (oldest first, never empty); the first `state` is None."""


def replay(policy: Policy, signals: Sequence[Signals]) -> list[tuple[int, Proposal]]:
    """The changes that a policy would have requested, with their steps, for these signals one by one.

    Nothing is applied, so signals after a change are those of a run without the change.
    """
    requested: list[tuple[int, Proposal]] = []
    state: Any = None
    for end in range(1, len(signals) + 1):
        decision = policy.decide(signals[max(0, end - KEPT) : end], state)
        state = decision.state
        requested += [(signals[end - 1].step, proposal) for proposal in decision.proposals]
    return requested
