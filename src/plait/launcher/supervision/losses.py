"""What the trouble of a worker or a host means: the others go on without it, or the job ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from plait.launcher.failure_cause import RankState, describe_status, find_cause, is_conclusive
from plait.launcher.membership_decisions import MOST_FAILED_STARTS
from plait.launcher.messages import EndWorkers, Failure, WorkerEnd, process_name
from plait.launcher.supervision.host_agents import HostAgents
from plait.launcher.supervision.launch_errors import WorkerError
from plait.launcher.supervision.member_changes import GRACE_S, MemberChanges
from plait.launcher.supervision.worker_states import Trouble, WorkerStates

# After a worker has lost another one, an agent that is silent for this long is lost with its host.
SILENT_S = 7.0


class Losses:
    """Removes lost workers and hosts from the job; raises the error that ends it."""

    def __init__(
        self, hosts: HostAgents, workers: WorkerStates, members: MemberChanges, warn: Callable[[str], None]
    ) -> None:
        self._hosts, self._workers, self._members, self._warn = hosts, workers, members, warn
        self._roster = members.roster
        self._first_sign_at: float | None = None

    def take(self, sign: Trouble) -> None:
        """A worker is in trouble, or has ended."""
        state = self._workers[sign.rank]
        if self._workers.record_trouble(sign):
            if state is self._workers.coordinator:  # its state exists nowhere else
                raise self._failed([state])
            if not self._roster.has_begun:
                self._first_sign_at = self._first_sign_at or time.monotonic()
        if self._roster.has_begun:
            self._leave_out(state)

    def is_over(self) -> bool:
        """Whether all workers are done, or lost if that is tolerated; raises if the job has failed."""
        if self._roster.has_begun:
            self._members.form_again_if_due()
            return self._roster.is_over()
        ranks = self._workers.ranks
        if self._first_sign_at is not None:
            waited_s = time.monotonic() - self._first_sign_at
            if (is_conclusive(ranks) or waited_s > GRACE_S) and not self._may_be_its_host(waited_s):
                raise self._failed(ranks)
            return False
        return all(state.done for state in ranks)

    def lose_host(self, index: int, describe: Callable[[int], str]) -> None:
        """A host's agent is gone or unreachable: its workers are lost; raises if this ends the job."""
        if index in self._hosts.lost:
            return
        self._hosts.lost.add(index)
        self._roster.close_host(index)
        if not self._roster.has_begun or index == 0:
            if not all(state.done for state in self._workers):
                raise self._hosts.failed(describe(index))
            return
        for state in self._workers.ranks:
            if self._hosts.index_of(state.host) == index and not state.done and state.status is None:
                self.take(WorkerEnd(state.rank, -signal.SIGKILL))
        self._hosts.kill(index)

    def check_agents(self) -> None:
        """Treat the host of an agent that has sent nothing for too long as lost."""
        for index in self._hosts.silent():
            self.lose_host(index, self._hosts.describe_silence)

    def _leave_out(self, state: RankState) -> None:
        """Remove a worker that has ended or hangs from the job; raises if its failure ends the job.

        The failure of a worker that never joined does not end the job: the members do not have it.
        """
        if state.done or state.rank in self._roster.left:
            return
        has_joined = self._roster.has_joined(state.rank)
        if state.failure is not None and has_joined and self._ends_all(state.failure):
            if self._members.too_few is not None:  # the rest cannot write a checkpoint
                raise self._members.ended()
            raise self._failed([state])
        if state.status is not None:
            reason = state.failure.summary if state.failure else describe_status(state.status)
            if state.silent_s is not None:
                reason = f"hung: no sign of life for {state.silent_s:.0f} s"
            lost = "is lost" if has_joined else "could not join"
            log = self._log_of(state.rank) if has_joined else ""
            self._warn(f"worker {state.rank} on {state.host} {lost} ({reason}); the rest goes on{log}")
            self._roster.on_gone(state.rank, reason)
            if not has_joined and self._roster.gives_up_joiners:
                self._warn(
                    f"no more workers are started after {MOST_FAILED_STARTS} that could not join"
                    f"{self._log_of(state.rank)}; try again with plait resize"
                )
        elif state.silent_s is not None:
            self._hosts.broadcast(EndWorkers((state.rank,)))

    def _ends_all(self, failure: Failure) -> bool:
        """Whether a failure that a worker reports ends the job: with its samples the others would fail too.

        If workers average weights, only the worker's step is lost, unless the cause holds for all workers.
        """
        return failure.lost is None and (failure.everywhere or self._hosts.placement.lease_s is None)

    def _may_be_its_host(self, waited_s: float) -> bool:
        """Whether the worker that failed may have been lost with its host, which is known soon."""
        state = self._workers[find_cause(self._workers.ranks).rank]
        index = self._hosts.index_of(state.host)
        if not index or state.failure is not None or state.silent_s is not None:
            return False
        if state.status is not None:  # the end of its agent may follow
            return waited_s < GRACE_S
        if self._hosts.silent_s(index) < waited_s:
            return False
        if waited_s > SILENT_S:
            self.lose_host(index, self._hosts.describe_loss)
        return True

    def _log_of(self, rank: int) -> str:
        logs = self._hosts.launch.logs
        return f" (its log: {logs / process_name(rank)}.err)" if logs is not None else ""

    def _failed(self, states: list[RankState]) -> WorkerError:
        return WorkerError(find_cause(states), self._hosts.launch.logs)
