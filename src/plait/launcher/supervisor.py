"""The supervisor: starts one agent per host, forwards messages, and decides what to do when workers end.

It imports no torch, so commands start fast.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from plait.comm.handshake import new_secret
from plait.comm.running_clock import RunningClock
from plait.core.errors import InputError, LaunchError, PlaitError
from plait.core.names import user_folders
from plait.launcher import messages
from plait.launcher.display import Display, WorkerState
from plait.launcher.failure_cause import RankState, describe_status, find_cause, is_conclusive
from plait.launcher.launchers import Launcher, Stream
from plait.launcher.launchers.agent_stream import AgentEnd, AgentProcess, Inbox
from plait.launcher.launchers.choose import launcher_of
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
from plait.schema.hosts import LOCAL, Host
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
# How often a launcher is asked about its hosts.
LOOK_S = 1.0
# After a worker has lost another one, an agent that is silent for this long is lost with its host.
SILENT_S = 7.0
LAST_LINES = 20
POLICY = "policy"


@contextlib.contextmanager
def handling_stop_signals(
    handle: Callable[[int], object], more: tuple[signal.Signals, ...] = ()
) -> Iterator[None]:
    """Call `handle` with each SIGINT, SIGTERM or SIGHUP, or of `more`, within the block, rather than end.

    Does nothing outside the main thread. An ignored signal stays ignored, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [
        number
        for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more}
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last(names: list[str], name: str) -> int:
    """The last index of `name`: a host that was lost and came back has two."""
    return len(names) - 1 - names[::-1].index(name)


class Supervisor:
    """Runs one launch. Ctrl-C or SIGTERM asks the workers to stop cleanly; a second one kills them.

    If workers have nothing to save, the first one kills them.
    """

    def __init__(self, launch: Launch, display: Display, launcher: Launcher | None = None) -> None:
        placement = launch.placement
        forwarded = {
            name: value
            for name, value in os.environ.items()
            if any(fnmatchcase(name, pattern) for pattern in placement.forward)
        }
        placement = replace(placement, environment={**forwarded, **placement.environment})
        self._launch = replace(launch, placement=placement)
        self._placement = placement
        self._launcher = launcher or launcher_of(placement)
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
        # The indices of hosts that were lost, hosts that were added, and what the launcher said of them.
        self._lost: set[int] = set()
        self._new_hosts: list[Host] = []
        self._store = ""
        self._is_noticed = False
        self._looked = time.monotonic()

    def run(self, prepare: Callable[[], None] = lambda: None) -> dict[int, Any]:
        """Run the launch; returns the return value of the entry of each rank and of the coordinator.

        Raises if the job failed. All processes have ended when it returns. `prepare` is called once every
        host has accepted the job, before any worker starts. Workers that were lost have no result.
        """
        with handling_stop_signals(self._on_signal, self._launcher.signals):
            try:
                for host in self._placement.hosts:
                    self._order_agent(self._start_agent(host))
                self._store = self._await_ready()
                prepare()
                # From here on agents forward a request to stop, also to workers that are still starting.
                self._begun = True
                self._broadcast(messages.StartAll(self._store))
                return self._await_results()
            finally:
                self._end_agents()

    def request_stop(self) -> None:
        """Ask the workers to finish their step, write a checkpoint and end. Safe in a signal handler."""
        self._inbox.put((-1, messages.Stop()))

    def _on_signal(self, number: int) -> None:
        if not self._launcher.signalled(number) and number not in self._launcher.signals:
            self.request_stop()

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

    def _start_agent(self, host: Host) -> Stream:
        # Without the current folder on its Python path.
        command = [self._placement.interpreter, "-P", "-u", "-m", "plait.launcher.agent"]
        try:
            return self._launcher.start(host, command, self._placement.environment)
        except LaunchError as failure:
            raise LaunchError(f"{host.name}: {failure}") from None

    def _order_agent(self, stream: Stream) -> None:
        """Give the agent of the next host its order."""
        agent = AgentProcess(len(self._agents), stream, self._inbox, self._clock.read())
        self._agents.append(agent)
        agent.send(self._agent_order(agent.index))

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
            signals=self._launcher.signals,
            if_silent=self._launcher.if_silent,
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
                case messages.Signalled():
                    self._launcher.signalled(message.number)
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
                raise self._failed(f"{steps.too_few}; go on with --resume from the newest checkpoint")
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
                case AgentEnd():
                    self._lost.add(index)
                    raise self._failed(str(self._agent_gone(index)))
                case messages.CheckFailure():
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
            raise self._failed(f"{self._too_few}; a checkpoint was written: go on with --resume")
        return self._results

    def _serve_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            message = self._receive(time.monotonic() + TICK_S)
            if message is not None:
                self._take(*message)
            self._check_agents()
            self._look_at_hosts()
            self._proceed()

    def _look_at_hosts(self) -> None:
        """Ask the launcher every second whether hosts were lost, are new, or are taken away."""
        if time.monotonic() < self._looked + LOOK_S:
            return
        self._looked = time.monotonic()
        seconds = self._launcher.notice()
        if seconds is not None and not self._is_noticed:
            self._is_noticed = True
            self._warn(f"the run is to end within {seconds:.0f} s: a checkpoint is written before")
            if self._stops == 0:
                self._on_stop()
        changes = self._launcher.changed()
        names = [host.name for host in self._placement.hosts]
        for name in changes.lost:
            if name in names and (index := _last(names, name)) not in self._lost:
                self._lose_host(index, self._host_gone)
        self._new_hosts += changes.new
        if self._placement.elastic is not None and self._roster.has_begun and not self._stops:
            while self._new_hosts:
                self._add_host(self._new_hosts.pop())

    def _add_host(self, host: Host) -> None:
        """Start the agent of a new host; workers are started there once it is ready."""
        known = [each.name for each in self._placement.hosts]
        if host.name in known and _last(known, host.name) not in self._lost:
            return
        try:
            stream = self._start_agent(host)
        except LaunchError as failure:
            self._warn(f"{failure}; the run goes on without it")
            return
        capacity = (*self._capacity(), host.slots)
        hosts = (*self._placement.hosts, replace(host, slots=0))
        self._placement = replace(self._placement, hosts=hosts, capacity=capacity)
        self._launch = replace(self._launch, placement=self._placement)
        self._printed.append(deque(maxlen=LAST_LINES))
        self._roster.add_host(host)
        self._order_agent(stream)

    def _take(self, index: int, message: JobMessage) -> None:
        match message:
            case AgentEnd():
                self._lose_host(index, self._agent_gone)
            case messages.HostReady():  # a new one
                self._agents[index].send(messages.StartAll(self._store))
                self._roster.open_host(index, self._placement.capacity[index])
            case messages.Refusal() | messages.CheckFailure():
                why = message.why if isinstance(message, messages.Refusal) else "it cannot run the job"
                self._warn(f"{self._placement.hosts[index].name} is not used: {why}")
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
        return _last([host.name for host in self._placement.hosts], state.host)

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
                raise self._failed(f"{self._too_few}; go on with --resume from the newest checkpoint")
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
            waited_s = time.monotonic() - self._first_sign_at
            if (is_conclusive(self._ranks) or waited_s > GRACE_S) and not self._may_be_its_host(waited_s):
                raise self._worker_failed(self._ranks)
            return False
        return all(state.done for state in self._ranks)

    def _may_be_its_host(self, waited_s: float) -> bool:
        """Whether the worker that failed may have been lost with its host, which is known soon."""
        state = self._state_of(find_cause(self._ranks).rank)
        index = self._host_of(state)
        if index == 0 or state.failure is not None or state.silent_s is not None:
            return False
        if state.status is not None:  # the end of its agent may follow
            return waited_s < GRACE_S
        agent = self._agents[index]
        if self._clock.read() - agent.last_seen_s < waited_s:
            return False
        if waited_s > SILENT_S:
            self._lose_host(index, self._host_gone)
        return True

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
        if index in self._lost:
            return
        self._lost.add(index)
        self._roster.close_host(index)
        if not self._roster.has_begun or index == 0:
            if not all(state.done for state in (*self._ranks, self._coordinator) if state is not None):
                raise self._failed(str(describe(index)))
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
        host, agent = self._placement.hosts[index], self._agents[index]
        status = agent.wait(1.0)
        by = self._launcher.reached_by(host)
        where = f" (reached by {by})" if by else ""
        # Its last messages may not have been read yet.
        end = time.monotonic() + 0.3
        while self._receive(end) is not None:
            pass
        output = "\n".join(self._printed[index]) or "(nothing)"
        how = "is still there" if status is None else describe_status(status)
        return LaunchError(f"the agent on {host.name}{where} {how}; it printed:\n{output}")

    def _failed(self, message: str) -> LaunchError:
        """The error that ends the job, which may be started again if hosts were lost."""
        names = tuple(self._placement.hosts[index].name for index in sorted(self._lost))
        return HostLostError(message, names) if names else LaunchError(message)

    def _host_gone(self, index: int) -> LaunchError:
        host = self._placement.hosts[index].name
        return LaunchError(f"{host} is lost: nothing is heard of it; all workers were ended")

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
        """Close the connections, upon which agents kill their workers and end; then kill what still runs.

        What leads to a lost host is killed at once: no agent answers there.
        """
        for agent in self._agents:
            agent.close()
            if agent.index in self._lost:
                agent.end()
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


class HostLostError(LaunchError):
    """Hosts were lost, and the job could not go on without them.

    `folder` is that of the run, whose newest checkpoint can be continued from.
    """

    def __init__(self, message: str, hosts: tuple[str, ...]) -> None:
        super().__init__(message)
        self.hosts = hosts
        self.folder: Path | None = None


class Interrupted(LaunchError):
    """The user stopped the job before its end."""

    exit_status = 130
