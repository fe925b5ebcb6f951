"""The display of a launch: the interface between the supervisor, the run folder and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerState:
    """One worker as the supervisor knows it."""

    rank: int
    host: str
    pid: int


class Display:
    """Receives events while workers run, in the supervisor's thread; this one shows nothing."""

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        pass

    def progressed(self, progress: Mapping[str, Any]) -> None:
        pass

    def printed(self, line: str) -> None:
        pass

    def wrote(self, line: str) -> None:
        """A worker has written a line to its standard output."""
        self.printed(line)

    def stopping(self) -> None:
        pass


Silent = Display
