"""The supervisor: starts one agent per host, forwards messages, and decides what to do when workers end.

It imports no torch, so commands start fast.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.comm.handshake import new_secret
from plait.comm.running_clock import RunningClock
from plait.core.errors import InputError, LaunchError, PlaitError
from plait.core.names import user_folders
from plait.launcher import messages
from plait.launcher.display import Display, WorkerState
from plait.launcher.failure_cause import RankState, describe_status, find_cause, is_conclusive
from plait.launcher.membership_decisions import MOST_FAILED_STARTS, ControlRequest, NextSteps, Roster
from plait.launcher.messages import (
    COORDINATOR,
    AgentOrder,
    CoordinatorAnswer,
    CoordinatorQuestion,
    Failure,
    JobMessage,
    Launch,
)
from plait.launcher.start_agent import AgentEnd, AgentProcess, Inbox, agent_command, shell_of
from plait.schema.hosts import LOCAL
from plait.schema.placement import ElasticRules

START_S = 120.0
# After the first report of a lost worker, wait this long for reports that name the cause.
GRACE_S = 2.0
END_S = 5.0
# Agents send a sign of life every few seconds.
AGENT_SILENT_S = 30.0
# An agent that receives nothing ends after this multiple of the time after which the supervisor gives it up.
AGENT_TIMEOUT_FACTOR = 2.0
TICK_S = 0.5
LAST_LINES = 20
POLICY = "policy"


@contextlib.contextmanager
def handling_stop_signals(handle: Callable[[int], object]) -> Iterator[None]:
    """Call `handle` with each SIGINT, SIGTERM or SIGHUP within the block, rather than end.

    Does nothing outside the main thread. An ignored signal stays ignored, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervisor:
    """Runs one launch. Ctrl-C or SIGTERM asks the workers to stop cleanly; a second one kills them.

    If workers have nothing to save, the first one kills them.
    """

    def __init__(self, launch: Launch, display: Display) -> None:
        self._launch = launch
        self._placement = launch.placement
        self._display = display
        self._secret = new_secret()
        self._inbox: Inbox = queue.SimpleQueue()
        self._agents: list[AgentProcess] = []
        self._clock = RunningClock(TICK_S + 2.0)
        self._printed = [deque[str](maxlen=LAST_LINES) for _ in launch.placement.hosts]
        hosts = [host.name for host in launch.placement.hosts for _ in range(host.slots)]
        self._ranks = [RankState(rank, host) for rank, host in enumerate(hosts)]
        self._coordinator: RankState | None = None
        if launch.coordinator is not None:
            self._coordinator = RankState(COORDINATOR, hosts[0])
        self._results: dict[int, Any] = {}
        # The warnings of the workers and of the supervisor, oldest first.
        self.warnings: list[str] = []
        self._signs = 0
        self._first_sign_at: float | None = None
        self._stops = 0
        self._begun = False
        rules = launch.placement.elastic
        # A job that is not elastic continues without lost workers if it can; they are not replaced.
        capacity = [0] * len(launch.placement.hosts) if rules is None else self._capacity()
        self._roster = Roster(launch.placement.hosts, capacity, rules or ElasticRules())
        # The report that members cannot communicate, and when it came; and why the job ends for lack of them.
        self._broken: tuple[messages.BreakReport, float] | None = None
        self._too_few: str | None = None

    def run(self, prepare: Callable[[], None] = lambda: None) -> dict[int, Any]:
        """Run the launch; returns the return value of the entry of each rank and of the coordinator.

        Raises if the job failed. All processes have ended when it returns. `prepare` is called once every
        host has accepted the job, before any worker starts. Workers that were lost have no result.
        """
        with handling_stop_signals(lambda _: self.request_stop()):
            try:
                for index in range(len(self._placement.hosts)):
                    self._start_agent(index)
                store = self._await_ready()
                prepare()
                # From here on agents forward a request to stop, also to workers that are still starting.
                self._begun = True
                self._broadcast(messages.StartAll(store))
                return self._await_results()
            finally:
                self._end_agents()

    def request_stop(self) -> None:
        """Ask the workers to finish their step, write a checkpoint and end. Safe in a signal handler."""
        self._inbox.put((-1, messages.Stop()))

    def request_control(self, request: ControlRequest) -> None:
        """Queue a request of the control endpoint; may be called from any thread."""
        self._inbox.put((-1, request))

    def _warn(self, message: str) -> None:
        self._display.printed(f"warning: {message}")
        self.warnings.append(message)

    def _show_workers(self, ranks: Iterable[int]) -> None:
        states = [self._ranks[rank] for rank in ranks]
        self._display.started(tuple(WorkerState(s.rank, s.host, s.pid or 0) for s in states))

    def _capacity(self) -> list[int]:
        """The largest number of workers for each host: no limit on this machine, otherwise its slots."""
        hosts, rules = self._placement.hosts, self._placement.elastic
        slots = self._placement.capacity or tuple(host.slots for host in hosts)
        if rules is not None and len(hosts) == 1 and hosts[0].name == LOCAL:
            return [max(rules.max_allowed, slots[0])]
        return list(slots)

    def _start_agent(self, index: int) -> None:
        host = self._placement.hosts[index]
        command = agent_command(self._placement, host)
        try:
            agent = AgentProcess(index, command, self._inbox, self._clock.read())
        except OSError as failure:
            raise LaunchError(f"{host.name}: cannot run {shlex.join(command)}: {failure.strerror}") from None
        self._agents.append(agent)
        agent.send(self._agent_order(index))

    def _agent_order(self, index: int) -> AgentOrder:
        # An agent on this machine notices at once when this process ends; across a network it may not.
        is_local = self._placement.hosts[index].name == LOCAL
        return AgentOrder(
            launch=self._launch,
            index=index,
            capacity=self._capacity()[index],
            membership=self._roster.membership,
            secret=self._secret.hex(),
            folder=os.getcwd(),
            modules=tuple(user_folders()),
            supervisor_timeout_s=None if is_local else AGENT_TIMEOUT_FACTOR * self._agent_timeout_s,
        )

    def _broadcast(self, message: JobMessage) -> None:
        """Send a message to all agents."""
        for agent in self._agents:
            agent.send(message)

    def _receive(self, end: float) -> tuple[int, JobMessage] | None:
        """The next message of an agent, or None at the time `end`; printed lines are displayed."""
        while True:
            try:
                index, message = self._inbox.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            match message:
                case messages.Stop():
                    self._on_stop()
                    continue
                case ControlRequest():
                    self._on_control(message)
                    continue
            self._agents[index].last_seen_s = self._clock.read()
            if not isinstance(message, messages.OutputLine):
                return index, message
            self._print(index, message.text)

    def _print(self, index: int, line: str) -> None:
        self._printed[index].append(line)
        self._display.printed(line)

    def _on_stop(self) -> None:
        self._stops += 1
        if self._stops > 1:
            raise Interrupted(
                "stopped at once, at a second request; the newest checkpoint is the last one written"
            )
        if not self._begun:
            raise Interrupted("stopped before any worker had started; nothing was run")
        if not self._launch.saves:
            raise Interrupted("stopped at once: these workers save nothing when they are asked to stop")
        self._display.stopping()
        self._roster.stop()
        self._broadcast(messages.Stop())

    def _on_control(self, request: ControlRequest) -> None:
        if self._placement.elastic is None:
            request.answer.put(
                InputError("the job's workers are fixed; start it with parallel.elastic: true")
            )
        elif self._stops and (request.workers or request.hosts):
            request.answer.put(InputError("the job is being stopped; its workers stay as they are"))
        else:
            self._apply(request)

    def _apply(self, request: ControlRequest) -> None:
        """Apply a request to resize, or to show the workers, and answer it."""
        try:
            self._roster.apply(request)
        except PlaitError as failure:
            request.answer.put(failure)
            if request.by == POLICY:
                self._warn(f"a policy asked for {request.workers} workers: {failure}")
            return
        members = self._roster.membership.members
        request.answer.put({**self._roster.state(), "pids": {m: self._ranks[m].pid for m in members}})
        self._proceed()

    def _proceed(self) -> None:
        """Execute the roster's next steps until there are none."""
        if (membership := self._roster.newly_joined()) is not None:
            self._show_workers(membership.members)
            if leavers := self._roster.dismiss():
                self._broadcast(messages.Dismissal(leavers))
        while (steps := self._roster.next_steps()) != NextSteps():
            self._execute(steps)

    def _execute(self, steps: NextSteps) -> None:
        for start in steps.start:
            assert start.worker == len(self._ranks)
            self._ranks.append(RankState(start.worker, self._placement.hosts[start.host].name))
            self._agents[start.host].send(messages.StartWorker(start.worker, start.slot))
        if steps.end:
            self._broadcast(messages.EndWorkers(steps.end))
        if steps.publish is not None:
            self._broken = None
            self._broadcast(messages.NewMembership(steps.publish))
        if steps.too_few is not None:
            if steps.publish is None:
                raise LaunchError(f"{steps.too_few}; go on with --resume from the newest checkpoint")
            self._too_few = steps.too_few
            self._warn(f"{steps.too_few}; the run ends")
            self._broadcast(messages.Stop())

    def _form_again_if_due(self) -> None:
        """Let members that cannot communicate try again, unless the end of a worker explains it."""
        if self._broken is not None and time.monotonic() > self._broken[1] + GRACE_S:
            (report, _), self._broken = self._broken, None
            self._execute(self._roster.form_again(report.version, report.why))

    def _await_ready(self) -> str:
        """Wait until every host has accepted the job; returns the address of its store."""
        ready: dict[int, str] = {}
        end = time.monotonic() + START_S
        while len(ready) < len(self._agents):
            received = self._receive(end)
            if received is None:
                silent = [h.name for i, h in enumerate(self._placement.hosts) if i not in ready]
                raise LaunchError(f"no answer from {', '.join(silent)} within {START_S:.0f} s")
            index, message = received
            match message:
                case AgentEnd() | messages.CheckFailure():
                    raise self._agent_gone(index)
                case messages.Refusal():
                    raise InputError(message.why)
                case messages.HostReady():
                    ready[index] = message.store
        return ready[0]

    def _await_results(self) -> dict[int, Any]:
        self._serve_until(self._is_over)
        if self._coordinator is not None:
            coordinator = self._coordinator
            self._agents[0].send(messages.CloseCoordinator())
            self._serve_until(lambda: coordinator.done)
        if self._too_few is not None:
            raise LaunchError(f"{self._too_few}; a checkpoint was written: go on with --resume")
        return self._results

    def _serve_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            message = self._receive(time.monotonic() + TICK_S)
            if message is not None:
                self._take(*message)
            self._check_agents()
            self._proceed()

    def _take(self, index: int, message: JobMessage) -> None:
        match message:
            case AgentEnd():
                self._lose_host(index, self._agent_gone)
            case messages.UnreachableHost():
                self._lose_host(message.index, self._link_lost)
            case messages.WorkerPids():
                self._record_pids(message.pids)
            case messages.WarningReport():
                # Once for all workers; the worker itself prints it.
                if message.text not in self.warnings:
                    self.warnings.append(message.text)
            case messages.ProgressReport():
                self._roster.on_progress(message.progress.get("step", -1))
                self._display.progressed(message.progress)
            case messages.ResultReport():
                self._record_result(message.rank, message.value)
            case CoordinatorQuestion():
                self._agents[0].send(message)
            case CoordinatorAnswer():
                self._agents[self._host_of(self._ranks[message.rank])].send(message)
            case Failure() | messages.WorkerSilence() | messages.WorkerEnd():
                self._record_trouble(message)
            case messages.ReadyReport():
                self._roster.on_ready(message.rank)
            case messages.JoinReport():
                self._roster.on_joined(message.rank, message.version)
            case messages.BreakReport():
                self._broken = self._broken or (message, time.monotonic())
            case messages.LeaveRequest(rank):
                if (request := self._roster.without(rank)) is not None:
                    self._apply(request)
            case messages.ResizeRequest():
                self._apply(ControlRequest(message.workers, by=POLICY, why=message.why))

    def _state_of(self, rank: int) -> RankState:
        if rank != COORDINATOR:
            return self._ranks[rank]
        assert self._coordinator is not None
        return self._coordinator

    def _host_of(self, state: RankState) -> int:
        """The index of its host."""
        return [host.name for host in self._placement.hosts].index(state.host)

    def _record_result(self, rank: int, value: Any) -> None:
        self._state_of(rank).done = True
        if rank not in self._roster.left:
            self._results[rank] = value
        if rank != COORDINATOR and rank not in self._roster.left:
            self._roster.on_done(rank)

    def _leave_out(self, state: RankState) -> None:
        """Remove a worker that has ended or hangs from the job; raises if its failure ends the job.

        The failure of a worker that never joined does not end the job: the members do not have it.
        """
        if state.done or state.rank in self._roster.left:
            return
        has_joined = self._roster.has_joined(state.rank)
        if state.failure is not None and has_joined and self._ends_all(state.failure):
            if self._too_few is not None:  # the rest cannot write a checkpoint
                raise LaunchError(f"{self._too_few}; go on with --resume from the newest checkpoint")
            raise self._worker_failed([state])
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
            self._broadcast(messages.EndWorkers((state.rank,)))

    def _ends_all(self, failure: Failure) -> bool:
        """Whether a failure that a worker reports ends the job: with its samples the others would fail too.

        If workers average weights, only the worker's step is lost, unless the cause holds for all workers.
        """
        return failure.lost is None and (failure.everywhere or self._placement.lease_s is None)

    def _record_trouble(self, sign: Failure | messages.WorkerSilence | messages.WorkerEnd) -> None:
        """Record a worker's failure report, its missing heartbeat, or its end."""
        state = self._state_of(sign.rank)
        match sign:
            case Failure():
                state.failure = sign
            case messages.WorkerEnd():
                state.status = sign.status
            case messages.WorkerSilence():
                state.silent_s = sign.seconds
        if not state.done and state.trouble_index is None:
            self._signs += 1
            state.trouble_index = self._signs
            if state is self._coordinator:  # its state exists nowhere else
                raise self._worker_failed([state])
            if not self._roster.has_begun:
                self._first_sign_at = self._first_sign_at or time.monotonic()
        if self._roster.has_begun:
            self._leave_out(state)

    def _is_over(self) -> bool:
        """Whether all workers are done, or lost if that is tolerated; raises if the job has failed."""
        if self._roster.has_begun:
            self._form_again_if_due()
            return self._roster.is_over()
        if self._first_sign_at is not None:
            if is_conclusive(self._ranks) or time.monotonic() > self._first_sign_at + GRACE_S:
                raise self._worker_failed(self._ranks)
            return False
        return all(state.done for state in self._ranks)

    def _record_pids(self, pids: Mapping[int, int]) -> None:
        for rank, pid in pids.items():
            self._ranks[rank].pid = pid
        if not self._roster.has_begun and all(state.pid is not None for state in self._ranks):
            self._show_workers(range(len(self._ranks)))

    def _log_of(self, rank: int) -> str:
        logs = self._launch.logs
        return f" (its log: {logs / messages.process_name(rank)}.err)" if logs is not None else ""

    def _lose_host(self, index: int, describe: Callable[[int], LaunchError]) -> None:
        """A host's agent is gone or unreachable: its workers are lost; raises if this ends the job."""
        self._roster.close_host(index)
        if not self._roster.has_begun or index == 0:
            if not all(state.done for state in (*self._ranks, self._coordinator) if state is not None):
                raise describe(index)
            return
        for state in self._ranks:
            if self._host_of(state) == index and not state.done and state.status is None:
                self._record_trouble(messages.WorkerEnd(state.rank, -signal.SIGKILL))
        self._agents[index].end()

    @property
    def _agent_timeout_s(self) -> float:
        return max(AGENT_SILENT_S, 3 * self._placement.link_timeout_s)

    def _check_agents(self) -> None:
        """Treat the host of an agent that has sent nothing for too long as lost."""
        now, longest_s = self._clock.read(), self._agent_timeout_s
        for agent in self._agents:
            if agent.is_running and now - agent.last_seen_s > longest_s:
                agent.last_seen_s = now
                self._lose_host(agent.index, lambda i: self._agent_silent(i, longest_s))

    def _agent_gone(self, index: int) -> LaunchError:
        host, agent = self._placement.hosts[index].name, self._agents[index]
        status = agent.wait(1.0)
        where = (
            ""
            if host == LOCAL
            else f" (reached by {shlex.join(shell_of(self._placement, self._placement.hosts[index]))})"
        )
        # Its last messages may not have been read yet.
        end = time.monotonic() + 0.3
        while self._receive(end) is not None:
            pass
        output = "\n".join(self._printed[index]) or "(nothing)"
        how = "is still there" if status is None else describe_status(status)
        return LaunchError(f"the agent on {host}{where} {how}; it printed:\n{output}")

    def _agent_silent(self, index: int, seconds: float) -> LaunchError:
        host = self._placement.hosts[index].name
        return LaunchError(
            f"the agent on {host} has shown no sign of life for {seconds:.0f} s; all workers were ended. "
            f"Go on with --resume"
        )

    def _link_lost(self, index: int) -> LaunchError:
        lost, head = self._placement.hosts[index].name, self._placement.hosts[0].name
        return LaunchError(
            f"{lost} and {head} could not reach each other for {self._placement.link_timeout_s:.0f} s; "
            f"all workers were ended. When the link is back, go on with --resume"
        )

    def _worker_failed(self, states: Iterable[RankState]) -> WorkerError:
        return WorkerError(find_cause(states), self._launch.logs)

    def _end_agents(self) -> None:
        """Close the connections, upon which agents kill their workers and end; then kill what still runs."""
        for agent in self._agents:
            agent.close()
        end = time.monotonic() + END_S
        for agent in self._agents:
            if agent.wait(max(0.1, end - time.monotonic())) is None:
                agent.end()
        for agent in self._agents:
            agent.join_readers(max(0.1, end - time.monotonic()))
        # Display what they printed last; later requests to stop have no effect.
        while not self._inbox.empty():
            index, message = self._inbox.get()
            if isinstance(message, messages.OutputLine):
                self._print(index, message.text)


class WorkerError(LaunchError):
    """A worker failed: names the worker, its host and its log, and has its traceback."""

    def __init__(self, cause: Failure, logs: Path | None) -> None:
        self.rank = cause.rank
        self.traceback = cause.traceback
        self.exit_status = cause.exit_status
        if self.exit_status == InputError.exit_status:
            super().__init__(cause.summary)
        else:
            log = f"\nits log: {logs / messages.process_name(cause.rank)}.err" if logs is not None else ""
            who = "the coordinator" if cause.rank == COORDINATOR else f"worker {cause.rank}"
            super().__init__(f"{who} on {cause.host} failed: {cause.summary}{log}")


class Interrupted(LaunchError):
    """The user stopped the job before its end."""

    exit_status = 130
