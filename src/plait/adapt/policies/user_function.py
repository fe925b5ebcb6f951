"""A user-defined policy: a function of the signals, named in the job file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.adapt.changes import BatchSizeChange, SyncChange, TopologyChange, WorkersChange
from plait.adapt.policies.policy import Decision, Proposal
from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError, JobError
from plait.core.names import check_arguments, in_words, parameters_of, resolve
from plait.core.run_events import Signals
from plait.core.shown import shown

_CHANGES = (BatchSizeChange, TopologyChange, WorkersChange, SyncChange)
_EXPECTED = f"a list of {', '.join(kind.__name__ for kind in _CHANGES)}"


class FunctionPolicy:
    """Calls `function(signals, **options)`, which returns a list of changes.

    A function whose second parameter is `state` is called with the state that it returned before, None at
    first, and returns (changes, state); the state is plain values and saved in checkpoints.
    """

    state_type: type | None = None

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name = name
        self._function: Callable[..., Any] = resolve(name, "adapt.kind", JobError)
        if not callable(self._function):
            raise JobError(f"adapt.kind: {name} is {self._function!r}, expected a function of the signals")
        self._options = dict(options)
        parameters = list(parameters_of(self._function))
        self._has_state = parameters[1:2] == ["state"]
        check_arguments(
            self._function, self._options, "adapt", JobError, positional=2 if self._has_state else 1
        )

    def decide(self, signals: Sequence[Signals], state: Any) -> Decision:
        given = (signals, state) if self._has_state else (signals,)
        try:
            returned = self._function(*given, **self._options)
        except Exception as failure:
            raise JobError(f"adapt: {self._name} failed with {in_words(failure)}") from failure
        after = None
        if self._has_state:
            if not isinstance(returned, (tuple, list)) or len(returned) != 2:
                raise self._wrong(returned, "(changes, state)")
            returned, after = returned
            self._check_state(after)
        if returned is not None and not isinstance(returned, (list, tuple)):
            raise self._wrong(returned, _EXPECTED)
        return Decision(tuple(self._proposal(each) for each in returned or ()), after)

    def _proposal(self, returned: Any) -> Proposal:
        proposal = (
            returned if isinstance(returned, Proposal) else Proposal(returned, f"decided by {self._name}")
        )
        change = proposal.change
        if not isinstance(change, _CHANGES) or not isinstance(proposal.why, str):
            raise self._wrong(returned, _EXPECTED)
        try:
            return Proposal(decode(type(change), _plain(change)), proposal.why)
        except ArtefactError as failure:
            raise self._wrong(returned, str(failure).rpartition("expected ")[2]) from None

    def _check_state(self, state: Any) -> None:
        try:
            json.dumps(encode(state))
        except (TypeError, ValueError):
            raise self._wrong(state, "a state of numbers, text, lists and dicts") from None

    def _wrong(self, value: Any, expected: str) -> JobError:
        return JobError(f"adapt: {self._name} returned {shown(value)}, expected {expected}")


def _plain(change: Any) -> dict[str, Any]:
    """The fields of a change, with numpy and torch numbers as Python numbers."""
    fields = encode(change)
    return {key: value.item() if hasattr(value, "item") else value for key, value in fields.items()}
