"""Who made a job fail, as a function of what its workers reported and how they ended."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from plait.core.errors import LostPeer
from plait.launch.messages import Failure


@dataclass
class RankState:
    """What is known of one worker. `order` counts signs of trouble in the job, in which they came.

    `failure` is the worker's own report; `status` is set once its process has ended; `silent_s` is set where
    its host's agent has had no sign of life from the process for that long.
    """

    rank: int
    host: str
    pid: int | None = None
    done: bool = False
    failure: Failure | None = None
    status: int | None = None
    silent_s: float | None = None
    order: int | None = None
    ended_here: bool = False  # by the supervisor, for its own reasons

    @property
    def lost_peer(self) -> LostPeer | None:
        """How it misses another worker, where it reports no more than that."""
        return self.failure.lost if self.failure is not None else None

    @property
    def failed_by_itself(self) -> bool:
        """Whether it failed, or its process was ended from outside, for a reason of its own."""
        if self.done or self.ended_here:
            return False
        if self.failure is not None:
            return self.lost_peer is None
        return self.status is not None

    @property
    def is_answering(self) -> bool:
        """Whether it is done or has reported, so that it does not hang."""
        return self.done or self.failure is not None


@dataclass(frozen=True)
class Cause:
    """The worker that a job's failure comes from, in words."""

    rank: int
    host: str
    summary: str
    traceback: str = ""
    exit_status: int = 1


def describe_status(status: int) -> str:
    """How a process ended, by its exit status."""
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def is_conclusive(states: Iterable[RankState]) -> bool:
    """Whether the known states identify the cause, so that there is no need to wait for more reports."""
    known = list(states)
    certain = any(state.silent_s is not None or _is_certain(state) for state in known)
    return certain or all(state.is_answering or state.status is not None for state in known)


def find_cause(states: Iterable[RankState]) -> Cause:
    """The worker to name: one that failed by itself, else one that hangs, else the first to report a loss.

    A process that aborts may have been aborted by torch because of another one, so it comes after the rest.
    """
    troubled = sorted((s for s in states if s.order is not None), key=lambda s: s.order or 0)
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
    """A worker that others wait for, or that shows its host no sign of life, and that reports nothing."""
    mute = {s.rank: s for s in states if not s.is_answering and s.status is None}
    for state in troubled:
        if state.rank in mute and state.silent_s is not None:
            words = f"hangs: its process has shown no sign of life for {state.silent_s:.0f} s"
            return Cause(state.rank, state.host, words)
    accusers = [s for s in troubled if s.lost_peer is not None]
    for accuser in accusers:
        peer = accuser.failure.peer if accuser.failure is not None else None
        if peer in mute:
            return _accused(mute[peer], accuser)
    if accusers and mute:
        return _accused(mute[min(mute)], accusers[0])
    return None


def _accused(state: RankState, accuser: RankState) -> Cause:
    assert accuser.failure is not None
    words = f"hangs: worker {accuser.rank} reports: {accuser.failure.summary}"
    return Cause(state.rank, state.host, words)
