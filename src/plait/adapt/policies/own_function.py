"""A user's own policy: a function of the signals, named in the job file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.adapt.changes import BatchSizeChange, SyncChange, TopologyChange, WorkersChange
from plait.adapt.policies.policy import Decision, Proposal
from plait.core.errors import JobError
from plait.core.names import check_arguments, in_words, parameters_of, resolve
from plait.core.run_events import Signals
from plait.core.shown import shown

_CHANGES = (BatchSizeChange, TopologyChange, WorkersChange, SyncChange)


class FunctionPolicy:
    """Calls `function(signals, **options)`, which returns a list of changes.

    A function whose second parameter is `state` is called with what it returned before, None at first, and
    returns (changes, state); the state is plain values, and checkpoints hold it.
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
            found = self._function(*given, **self._options)
        except Exception as failure:
            raise JobError(f"adapt: {self._name} failed with {in_words(failure)}") from failure
        if not self._has_state:
            found = found, None
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0] or (), (list, tuple)):
            raise self._wrong(found)
        changes, after = found
        return Decision(tuple(self._proposal(each) for each in changes or ()), after)

    def _proposal(self, found: Any) -> Proposal:
        if isinstance(found, Proposal):
            return found
        if not isinstance(found, _CHANGES):
            raise self._wrong(found)
        return Proposal(found, f"decided by {self._name}")

    def _wrong(self, found: Any) -> JobError:
        expected = f"a list of {', '.join(kind.__name__ for kind in _CHANGES)}"
        if self._has_state:
            expected = f"a pair of {expected}, and its state"
        return JobError(f"adapt: {self._name} returned {shown(found)}, expected {expected}")
