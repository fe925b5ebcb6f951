"""The signals of a run so far: policies look at them, and the record keeps them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from plait.core.run_events import Signals

KEPT = 200


class SignalHistory:
    """The newest signals, oldest first; `record` is called with each as it comes."""

    def __init__(self, record: Callable[[Signals], None] = lambda _: None) -> None:
        self._signals: deque[Signals] = deque(maxlen=KEPT)
        # The step of the signals that policies were asked about last.
        self.asked_at = 0
        self._record = record

    def add(self, signals: Signals) -> None:
        self._signals.append(signals)
        self._record(signals)

    def forget(self) -> None:
        """Begin anew: all workers see the same signals, also those that have just joined."""
        self._signals.clear()
        self.asked_at = 0

    def newest(self) -> tuple[Signals, ...]:
        """All that are kept, oldest first."""
        return tuple(self._signals)
