"""The recent signals of a run, for policies and for the event record."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError
from plait.core.run_events import Signals

KEPT = 200


class SignalHistory:
    """The newest signals, oldest first; `record` is called with each new one."""

    def __init__(self, record: Callable[[Signals], None] = lambda _: None) -> None:
        self._signals: deque[Signals] = deque(maxlen=KEPT)
        # The step of the last signals that policies have seen.
        self.asked_at = 0
        self._record = record

    def add(self, signals: Signals) -> None:
        """Add the newest signals; those of another number of workers, as before a resume, are dropped."""
        if self._signals and self._signals[-1].workers != signals.workers:
            self._signals.clear()
        self._signals.append(signals)
        self._record(signals)

    def forget(self) -> None:
        """Drop all signals, so that workers that have just joined have the same."""
        self._signals.clear()
        self.asked_at = 0

    def state(self) -> dict[str, Any]:
        """The signals as plain values, for `load`."""
        return {"asked_at": self.asked_at, "newest": [encode(signals) for signals in self._signals]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the signals of a checkpoint; they are not recorded again."""
        self.forget()
        with contextlib.suppress(ArtefactError):  # of another version: policies begin without signals
            self._signals.extend([decode(Signals, signals) for signals in state.get("newest", ())])
            self.asked_at = state.get("asked_at", 0)

    def newest(self) -> tuple[Signals, ...]:
        """All kept signals, oldest first."""
        return tuple(self._signals)
