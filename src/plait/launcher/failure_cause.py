"""Which worker made a job fail, as a pure function of the workers' reports and exit statuses."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from plait.core.errors import LostPeer
from plait.launcher.messages import Failure


@dataclass
class RankState:
    """What is known of one worker. `trouble_index` numbers the workers in the order of their first trouble.

    `failure` is the worker's report; `status` is set once its process has ended; `silent_s` is set if the
    host's agent has received no heartbeat from the process for that long.
    """

    rank: int
    host: str
    pid: int | None = None
    done: bool = False
    failure: Failure | None = None
    status: int | None = None
    silent_s: float | None = None
    trouble_index: int | None = None

    @property
    def lost_peer(self) -> LostPeer | None:
        """How it lost another worker, if that is all it reports."""
        return self.failure.lost if self.failure is not None else None

    @property
    def failed_by_itself(self) -> bool:
        """Whether it failed, or its process was killed, and not because it lost another worker."""
        if self.done:
            return False
        if self.failure is not None:
            return self.lost_peer is None
        return self.status is not None

    @property
    def exit_status(self) -> int:
        """The status of its process for a shell, where a signal adds its number to 128; 1 if it has none."""
        if self.failure is not None:
            return self.failure.exit_status
        status = self.status or 1
        return 128 - status if status < 0 else status

    @property
    def is_answering(self) -> bool:
        """Whether it is done or has reported a failure, so it does not hang."""
        return self.done or self.failure is not None


def describe_status(status: int) -> str:
    """A text for the exit status of a process."""
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def is_conclusive(states: Iterable[RankState]) -> bool:
    """Whether the states identify the cause, so there is no need to wait for more reports."""
    known = list(states)
    certain = any(state.silent_s is not None or _is_certain(state) for state in known)
    return certain or all(state.is_answering or state.status is not None for state in known)


def find_cause(states: Iterable[RankState]) -> Failure:
    """The failure to show: of a worker by itself, else one that hangs, else the first to report a loss.

    Torch may abort a process because of another one, so aborted processes are considered last.
    """
    troubled = sorted((s for s in states if s.trouble_index is not None), key=lambda s: s.trouble_index or 0)
    by_itself = [state for state in troubled if state.failed_by_itself]
    certain = [state for state in by_itself if _is_certain(state)]
    if certain:
        return _own_failure(certain[0])
    if hanging := _hanging(states, troubled):
        return hanging
    return _own_failure((by_itself or troubled)[0])


def _is_certain(state: RankState) -> bool:
    aborted = state.failure is None and state.status == -signal.SIGABRT
    return state.failed_by_itself and not aborted


def _own_failure(state: RankState) -> Failure:
    return state.failure or Failure(state.rank, state.host, describe_status(state.status or 0))


def _hanging(states: Iterable[RankState], troubled: list[RankState]) -> Failure | None:
    """A worker that reports nothing while others wait for it or its host receives no heartbeat."""
    silent = {s.rank: s for s in states if not s.is_answering and s.status is None}
    for state in troubled:
        if state.rank in silent and state.silent_s is not None:
            summary = f"hangs: its process has shown no sign of life for {state.silent_s:.0f} s"
            return Failure(state.rank, state.host, summary)
    reports = [s.failure for s in troubled if s.failure is not None and s.failure.lost is not None]
    if not reports or not silent:
        return None
    report = next((each for each in reports if each.peer in silent), reports[0])
    state = silent[min(silent) if report.peer not in silent else report.peer]
    summary = f"hangs: worker {report.rank} reports: {report.summary}"
    return Failure(state.rank, state.host, summary)
