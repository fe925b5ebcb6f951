"""Policies as a source of changes: called between steps with the recent signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.adapt.changes import ChangeRequest
from plait.adapt.history import SignalHistory
from plait.adapt.policies.policy import Policy, Proposal
from plait.adapt.policies.step_table import StepBased
from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError


@dataclass
class NamedPolicy:
    """A policy with its name in the job file and its state."""

    name: str
    policy: Policy
    state: Any = None


class PolicySource:
    """Calls policies after every `every_steps()` steps.

    Each policy gets the same signals; requests are in the order of the job file.
    """

    def __init__(
        self,
        policies: Sequence[tuple[str, Policy]],
        history: SignalHistory,
        every_steps: Callable[[], int] = lambda: 1,
    ) -> None:
        self._policies = [NamedPolicy(name, policy) for name, policy in policies]
        self._history = history
        self._every_steps = every_steps

    def next_due(self, step: int) -> int | None:
        tables = [named.policy for named in self._policies if isinstance(named.policy, StepBased)]
        steps = [due for table in tables if (due := table.next_due(step)) is not None]
        if len(tables) < len(self._policies):
            every = self._every_steps()
            steps.append(step + every - step % every)
        return min(steps, default=None)

    def due(self, step: int) -> list[ChangeRequest]:
        signals = self._history.newest()
        is_new = bool(signals) and signals[-1].step > self._history.asked_at
        requests: list[ChangeRequest] = []
        for named in self._policies:
            proposals: Sequence[Proposal] = ()
            if isinstance(named.policy, StepBased):
                proposals = named.policy.at(step)
            elif is_new:
                decision = named.policy.decide(signals, named.state)
                proposals, named.state = decision.proposals, decision.state
            requests += [ChangeRequest(each.change, named.name, each.why) for each in proposals]
        if is_new:
            self._history.asked_at = signals[-1].step
        return requests

    def state(self) -> dict[str, Any]:
        """The state for `load`, as plain values: each policy's state by name and index."""
        return {f"{i}/{named.name}": encode(named.state) for i, named in enumerate(self._policies)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's state; a new policy, or one whose state cannot be read, starts without one."""
        for i, named in enumerate(self._policies):
            kept, kind = state.get(f"{i}/{named.name}"), named.policy.state_type
            try:
                named.state = kept if kind is None or kept is None else decode(kind, kept)
            except ArtefactError:
                named.state = None
