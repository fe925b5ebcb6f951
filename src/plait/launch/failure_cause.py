"""Which worker made a job fail, as a pure function of the workers' reports and exit statuses."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from plait.core.errors import LostPeer
from plait.launch.messages import Failure


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
    def is_answering(self) -> bool:
        """Whether it is done or has reported a failure, so it does not hang."""
        return self.done or self.failure is not None


@dataclass(frozen=True)
class Cause:
    """The worker that made the job fail, and how."""

    rank: int
    host: str
    summary: str
    traceback: str = ""
    exit_status: int = 1


def describe_status(status: int) -> str:
    """A text for the exit status of a process."""
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def is_conclusive(states: Iterable[RankState]) -> bool:
    """Whether the states identify the cause, so there is no need to wait for more reports."""
    known = list(states)
    certain = any(state.silent_s is not None or _is_certain(state) for state in known)
    return certain or all(state.is_answering or state.status is not None for state in known)


def find_cause(states: Iterable[RankState]) -> Cause:
    """The worker to name: one that failed by itself, else one that hangs, else the first to report a loss.

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


def _own_failure(state: RankState) -> Cause:
    if state.failure is None:
        return Cause(state.rank, state.host, describe_status(state.status or 0))
    failure = state.failure
    return Cause(state.rank, state.host, failure.summary, failure.traceback, failure.exit_status)


def _hanging(states: Iterable[RankState], troubled: list[RankState]) -> Cause | None:
    """A worker that reports nothing while others wait for it or its host receives no heartbeat."""
    silent = {s.rank: s for s in states if not s.is_answering and s.status is None}
    for state in troubled:
        if state.rank in silent and state.silent_s is not None:
            summary = f"hangs: its process has shown no sign of life for {state.silent_s:.0f} s"
            return Cause(state.rank, state.host, summary)
    reporters = [s for s in troubled if s.lost_peer is not None]
    for reporter in reporters:
        peer = reporter.failure.peer if reporter.failure is not None else None
        if peer in silent:
            return _hang_reported_by(silent[peer], reporter)
    if reporters and silent:
        return _hang_reported_by(silent[min(silent)], reporters[0])
    return None


def _hang_reported_by(state: RankState, reporter: RankState) -> Cause:
    assert reporter.failure is not None
    summary = f"hangs: worker {reporter.rank} reports: {reporter.failure.summary}"
    return Cause(state.rank, state.host, summary)
