"""The display of a launch: the Protocol between the supervisor, the run folder and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class WorkerState:
    """One worker as the supervisor knows it."""

    rank: int
    host: str
    pid: int


class Display(Protocol):
    """Receives events while workers run; called from the supervisor's thread."""

    def started(self, workers: tuple[WorkerState, ...]) -> None: ...
    def progressed(self, progress: Mapping[str, Any]) -> None: ...
    def printed(self, line: str) -> None: ...
    def stopping(self) -> None: ...


class Silent:
    """A display that shows nothing."""

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        pass

    def progressed(self, progress: Mapping[str, Any]) -> None:
        pass

    def printed(self, line: str) -> None:
        pass

    def stopping(self) -> None:
        pass
