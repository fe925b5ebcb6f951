"""The supervisor: starts one agent a host, passes on what workers say, decides what their ends mean.

It imports no torch, so a command is quick to answer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.comm.handshake import new_secret
from plait.comm.running_clock import RunningClock
from plait.core.errors import InputError, LaunchError
from plait.core.names import own_folders
from plait.launch import messages
from plait.launch.display import Display, WorkerState
from plait.launch.elastic import ControlRequest, ElasticWorkers
from plait.launch.membership import Membership
from plait.launch.messages import (
    COORDINATOR,
    AgentOrder,
    CoordinatorAnswer,
    CoordinatorQuestion,
    Failure,
    JobMessage,
    Launch,
    from_line,
    to_line,
)
from plait.launch.roster import MOST_FAILED_STARTS, Roster, Start
from plait.launch.verdict import Cause, RankState, describe_status, find_cause, is_conclusive
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import ElasticRules, Placement

START_S = 120.0
# For reports that name a better cause than the first that a worker lost another one.
GRACE_S = 2.0
END_S = 5.0
# Agents send a sign of life every few seconds, and so does the supervisor.
AGENT_SILENT_S = 30.0
BEAT_S = 5.0
# How much longer than that an agent that hears nothing goes on: by then the supervisor has given it up.
CUT_OFF = 2.0
TICK_S = 0.5
LAST_LINES = 20


class Supervisor:
    """Runs one launch. Ctrl-C or SIGTERM asks the workers to stop cleanly; a second one ends them at once.

    Where workers have nothing to save, the first one does.
    """

    def __init__(self, launch: Launch, display: Display) -> None:
        self._launch = launch
        self._placement = launch.placement
        self._display = display
        self._secret = new_secret()
        self._inbox: _Inbox = queue.SimpleQueue()
        self._agents: list[_AgentProcess] = []
        self._clock = RunningClock(TICK_S + 2.0)
        self._printed = [deque[str](maxlen=LAST_LINES) for _ in launch.placement.hosts]
        hosts = [host.name for host in launch.placement.hosts for _ in range(host.slots)]
        self._ranks = [RankState(rank, host) for rank, host in enumerate(hosts)]
        self._coordinator: RankState | None = None
        if launch.coordinator is not None:
            self._coordinator = RankState(COORDINATOR, hosts[0])
        self._results: dict[int, Any] = {}
        # What workers warned of, and what there is to say of them, in the order in which it came.
        self.warnings: list[str] = []
        self._signs = 0
        self._first_sign_at: float | None = None
        self._stops = 0
        self._begun = False
        rules = launch.placement.elastic
        # A job that is not elastic goes on without those that it loses, if it can: nobody takes their places.
        capacity = [0] * len(launch.placement.hosts) if rules is None else self._capacity()
        roster = Roster(launch.placement.hosts, capacity, rules or ElasticRules())
        can_change = launch.placement.may_lose_workers
        self._members = ElasticWorkers(roster, self, self._show_members, can_change)

    def run(self, prepare: Callable[[], None] = lambda: None) -> dict[int, Any]:
        """What each rank's entry, and the coordinator's, returned; raises when any of them failed.

        No process is left behind. `prepare` is called once every host has accepted the job, before any worker
        starts. Workers that were lost have no result.
        """
        with self._signals_mean_stop():
            try:
                for index in range(len(self._placement.hosts)):
                    self._start_agent(index)
                store = self._await_ready()
                prepare()
                # From here on agents pass a request to stop on, also to workers not announced yet.
                self._begun = True
                self.broadcast(messages.StartAll(store))
                return self._await_results()
            finally:
                self._end_agents()

    @contextlib.contextmanager
    def _signals_mean_stop(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A signal that is ignored stays so: nohup means it.
        signals = [
            s
            for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(s) is not signal.SIG_IGN
        ]
        before = {s: signal.signal(s, lambda *_: self.request_stop()) for s in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def request_stop(self) -> None:
        """Ask the workers to finish their step, write a checkpoint and end. Safe in a signal handler."""
        self._inbox.put((-1, messages.Stop()))

    def request_control(self, asked: ControlRequest) -> None:
        """Have a request for another number of workers answered; from any thread."""
        self._inbox.put((-1, asked))

    def start_worker(self, start: Start) -> None:
        """Have a host's agent start a worker that joins the job."""
        host = self._placement.hosts[start.host].name
        assert start.worker == len(self._ranks)
        self._ranks.append(RankState(start.worker, host))
        self._agents[start.host].send(messages.StartWorker(start.worker, start.slot))

    def end_workers(self, workers: tuple[int, ...]) -> None:
        for worker in workers:
            self._ranks[worker].ended_here = True
        self.broadcast(messages.EndWorkers(workers))

    def warn(self, words: str) -> None:
        self._display.printed(f"warning: {words}")
        self.warnings.append(words)

    def _note_warning(self, text: str) -> None:
        """Keep a worker's warning, which its log shows, once for all workers."""
        if text not in self.warnings:
            self.warnings.append(text)

    def pid_of(self, worker: int) -> int | None:
        return self._ranks[worker].pid

    def _show_members(self, membership: Membership) -> None:
        states = [self._ranks[member] for member in membership.members]
        self._display.started(tuple(WorkerState(s.rank, s.host, s.pid or 0) for s in states))

    def _capacity(self) -> list[int]:
        """How many workers each host may hold: all of them on this machine, else what its slots say."""
        hosts, rules = self._placement.hosts, self._placement.elastic
        slots = self._placement.capacity or tuple(host.slots for host in hosts)
        if rules is not None and len(hosts) == 1 and hosts[0].name == LOCAL:
            return [max(rules.max_allowed, slots[0])]
        return list(slots)

    def _start_agent(self, index: int) -> None:
        host = self._placement.hosts[index]
        command = agent_command(self._placement, host)
        try:
            agent = _AgentProcess(index, command, self._inbox, self._clock.read())
        except OSError as failure:
            raise LaunchError(f"{host.name}: cannot run {shlex.join(command)}: {failure.strerror}") from None
        self._agents.append(agent)
        agent.send(self._order(index))

    def _order(self, index: int) -> AgentOrder:
        # A process of this machine sees at once when this one ends. Across a network nobody may tell it.
        is_local = self._placement.hosts[index].name == LOCAL
        return AgentOrder(
            launch=self._launch,
            index=index,
            capacity=self._capacity()[index],
            membership=self._members.roster.membership,
            secret=self._secret.hex(),
            folder=os.getcwd(),
            modules=tuple(own_folders()),
            supervisor_timeout_s=None if is_local else CUT_OFF * self._agent_timeout_s,
        )

    def broadcast(self, message: JobMessage) -> None:
        """Send all agents something."""
        for agent in self._agents:
            agent.send(message)

    def _receive(self, end: float) -> tuple[int, JobMessage] | None:
        """The next thing that an agent said, or None at the time `end`; printed lines are passed on."""
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
            raise Interrupted("stopped while measuring; nothing was trained")
        self._display.stopping()
        self._members.stop()
        self.broadcast(messages.Stop())

    def _on_control(self, asked: ControlRequest) -> None:
        if self._placement.elastic is None:
            asked.answer.put(InputError("the job's workers are fixed; start it with parallel.elastic: true"))
        elif self._stops and (asked.workers or asked.hosts):
            asked.answer.put(InputError("the job is being stopped; its workers stay as they are"))
        else:
            self._members.serve(asked)

    def _await_ready(self) -> str:
        """The address of the job's store, once every host has accepted the order."""
        ready: dict[int, str] = {}
        end = time.monotonic() + START_S
        while len(ready) < len(self._agents):
            message = self._receive(end)
            if message is None:
                silent = [h.name for i, h in enumerate(self._placement.hosts) if i not in ready]
                raise LaunchError(f"no answer from {', '.join(silent)} within {START_S:.0f} s")
            index, said = message
            match said:
                case AgentEnd() | messages.CheckFailure():
                    raise self._agent_gone(index)
                case messages.Refusal():
                    raise InputError(said.why)
                case messages.HostReady():
                    ready[index] = said.store
        return ready[0]

    def _await_results(self) -> dict[int, Any]:
        self._serve_until(self._is_over)
        if self._coordinator is not None:
            coordinator = self._coordinator
            self._agents[0].send(messages.CloseCoordinator())
            self._serve_until(lambda: coordinator.done)
        if self._members.too_few is not None:
            raise LaunchError(f"{self._members.too_few}; a checkpoint was written: go on with --resume")
        return self._results

    def _serve_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            message = self._receive(time.monotonic() + TICK_S)
            if message is not None:
                self._take(*message)
            self._look_at_agents()

    def _take(self, index: int, message: JobMessage) -> None:
        match message:
            case AgentEnd():
                self._lose_host(index, self._agent_gone)
            case messages.UnreachableHost():
                self._lose_host(message.index, self._link_lost)
            case messages.WorkerPids():
                self._note_workers(message.pids)
            case messages.WarningReport():
                self._note_warning(message.text)
            case messages.ProgressReport():
                self._members.on_progress(message.progress.get("step", -1))
                self._display.progressed(message.progress)
            case messages.ResultReport():
                self._note_result(message.rank, message.value)
            case CoordinatorQuestion():
                self._agents[0].send(message)
            case CoordinatorAnswer():
                self._agents[self._host_of(self._ranks[message.rank])].send(message)
            case Failure() | messages.WorkerSilence() | messages.WorkerEnd():
                self._note_trouble(message)
            case _:
                self._members.take(message)

    def _state_of(self, rank: int) -> RankState:
        if rank != COORDINATOR:
            return self._ranks[rank]
        assert self._coordinator is not None
        return self._coordinator

    def _host_of(self, state: RankState) -> int:
        """The index of its host."""
        return [host.name for host in self._placement.hosts].index(state.host)

    def _note_result(self, rank: int, value: Any) -> None:
        self._state_of(rank).done = True
        if rank == COORDINATOR:
            self._results[rank] = value
            return
        if self._members.has_left(rank):
            return
        self._results[rank] = value
        self._members.on_done(rank)

    def _leave_out(self, state: RankState) -> None:
        """Leave a worker out that has ended or hangs, unless it reports what others would meet too.

        One that never took part is given up whatever it reports: those that train have not met it.
        """
        if state.done or state.ended_here:
            return
        has_joined = self._members.roster.has_joined(state.rank)
        if state.failure is not None and has_joined and self._ends_all(state.failure):
            raise self._worker_failed(find_cause([state]))
        if state.status is not None:
            words = state.failure.summary if state.failure else describe_status(state.status)
            if state.silent_s is not None:
                words = f"hung: no sign of life for {state.silent_s:.0f} s"
            lost = "is lost" if has_joined else "could not join"
            log = self._log_of(state.rank) if has_joined else ""
            self.warn(f"worker {state.rank} on {state.host} {lost} ({words}); the rest goes on{log}")
            self._members.on_gone(state.rank, words)
            if not has_joined and self._members.roster.gives_up_joiners:
                self.warn(
                    f"no more workers are started after {MOST_FAILED_STARTS} that could not join"
                    f"{self._log_of(state.rank)}; try again with plait resize"
                )
        elif state.silent_s is not None:
            self.broadcast(messages.EndWorkers((state.rank,)))

    def _ends_all(self, failure: Failure) -> bool:
        """Whether a worker's own report ends the job: the others take its samples, and would meet it too.

        Where workers average, a step that fails is lost with its worker, unless the reason holds for all.
        """
        return failure.lost is None and (failure.everywhere or self._placement.lease_s is None)

    def _note_trouble(self, sign: Failure | messages.WorkerSilence | messages.WorkerEnd) -> None:
        """Note a worker's own report, its silence, or its end."""
        state = self._state_of(sign.rank)
        match sign:
            case Failure():
                state.failure = sign
            case messages.WorkerEnd():
                state.status = sign.status
            case messages.WorkerSilence():
                state.silent_s = sign.seconds
        if not state.done and state.order is None:
            self._signs += 1
            state.order = self._signs
            if state is self._coordinator:  # nobody else has what it knows
                raise self._worker_failed(find_cause([state]))
            if not self._members.has_begun:
                self._first_sign_at = self._first_sign_at or time.monotonic()
        if self._members.has_begun:
            self._leave_out(state)

    def _is_over(self) -> bool:
        """Whether all workers are done, or lost where that is tolerated; raises where the job has failed."""
        if self._members.has_begun:
            return self._members.is_over()
        if self._first_sign_at is not None:
            if is_conclusive(self._ranks) or time.monotonic() > self._first_sign_at + GRACE_S:
                raise self._worker_failed(find_cause(self._ranks))
            return False
        return all(state.done for state in self._ranks)

    def _note_workers(self, pids: Mapping[int, int]) -> None:
        for rank, pid in pids.items():
            self._ranks[rank].pid = pid
        if self._members.has_begun:
            return
        if all(state.pid is not None for state in self._ranks):
            self._display.started(tuple(WorkerState(s.rank, s.host, s.pid or 0) for s in self._ranks))

    def _log_of(self, rank: int) -> str:
        logs = self._launch.logs
        return f" (its log: {logs / messages.process_name(rank)}.err)" if logs is not None else ""

    def _lose_host(self, index: int, describe: Callable[[int], LaunchError]) -> None:
        """A host's agent is gone or cannot be reached: its workers are lost, or else the job."""
        self._members.roster.close_host(index)
        if not self._members.has_begun or index == 0:
            if not all(state.done for state in (*self._ranks, self._coordinator) if state is not None):
                raise describe(index)
            return
        for state in self._ranks:
            if self._host_of(state) == index and not state.done and state.status is None:
                self._note_trouble(messages.WorkerEnd(state.rank, -signal.SIGKILL))
        self._agents[index].end()

    @property
    def _agent_timeout_s(self) -> float:
        return max(AGENT_SILENT_S, 3 * self._placement.link_timeout_s)

    def _look_at_agents(self) -> None:
        """Notice an agent that has said nothing for long."""
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
        # What it said last may still be on its way.
        end = time.monotonic() + 0.3
        while self._receive(end) is not None:
            pass
        said = "\n".join(self._printed[index]) or "(nothing)"
        how = "is still there" if status is None else describe_status(status)
        return LaunchError(f"the agent on {host}{where} {how}; it printed:\n{said}")

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

    def _worker_failed(self, cause: Cause) -> WorkerError:
        return WorkerError(cause, self._launch.logs)

    def _end_agents(self) -> None:
        """End what still runs: hang up, which an agent answers by ending its workers; then kill."""
        for agent in self._agents:
            agent.close()
        end = time.monotonic() + END_S
        for agent in self._agents:
            if agent.wait(max(0.1, end - time.monotonic())) is None:
                agent.end()
        for agent in self._agents:
            agent.join_readers(max(0.1, end - time.monotonic()))
        # What they printed last has been read by now; later requests to stop have nobody to reach.
        while not self._inbox.empty():
            index, message = self._inbox.get()
            if isinstance(message, messages.OutputLine):
                self._print(index, message.text)


def shell_of(placement: Placement, host: Host) -> list[str]:
    """The command that runs another one on `host`; none where it is this one."""
    return [] if host.name == LOCAL else shlex.split(placement.shell.format(host=shlex.quote(host.name)))


def agent_command(placement: Placement, host: Host) -> list[str]:
    """What starts the agent of `host`, without the current folder on its Python path."""
    shell, agent = shell_of(placement, host), [placement.interpreter, "-P", "-u", "-m", "plait.launch.agent"]
    # ssh puts its arguments together with spaces, for a shell on the other side to take apart.
    is_ssh = any(os.path.basename(word) == "ssh" for word in shell)
    return [*shell, *(map(shlex.quote, agent) if is_ssh else agent)]


class AgentEnd(JobMessage):
    """An agent has ended, or its host's shell."""


# What has come from an agent, by its index; or, from this process, a request to stop or to resize.
_Inbox = queue.SimpleQueue[tuple[int, JobMessage | ControlRequest]]


class _AgentProcess:
    """One agent, reached through its host's shell: its messages go into a queue, and nothing here waits.

    What is sent goes through a thread: a shell that does not read must not hold up the rest.
    """

    def __init__(self, index: int, command: list[str], inbox: _Inbox, now: float) -> None:
        self.index = index
        self.last_seen_s = now
        self._inbox = inbox
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            bufsize=1,
            # The terminal's Ctrl-C is for the supervisor alone.
            start_new_session=True,
        )
        self._unsent: queue.SimpleQueue[JobMessage | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_messages, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, message: JobMessage) -> None:
        self._unsent.put(message)

    def close(self) -> None:
        """Hang up, after what was sent before."""
        self._unsent.put(None)

    def wait(self, seconds: float) -> int | None:
        """Its exit status, or None where it has not ended within `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def join_readers(self, seconds: float) -> None:
        for reader in self._readers:
            reader.join(seconds)

    def _write(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        # An agent that is gone is noticed by its closed output.
        with contextlib.suppress(OSError, ValueError):
            message = self._unsent.get()  # the order
            while message is not None:
                stream.write(to_line(message).decode())
                stream.flush()
                try:
                    message = self._unsent.get(timeout=BEAT_S)
                except queue.Empty:
                    message = messages.Beat()
        with contextlib.suppress(OSError):
            stream.close()

    def _read_messages(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A remote shell may greet on the same stream.
            self._inbox.put((self.index, from_line(line) or messages.OutputLine(line.rstrip("\n"))))
        self._inbox.put((self.index, AgentEnd()))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._inbox.put((self.index, messages.OutputLine(line.rstrip("\n"))))


class WorkerError(LaunchError):
    """A worker failed: which one, on which host, with its own traceback."""

    def __init__(self, cause: Cause, logs: Path | None) -> None:
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
    """The user ended it before it could end by itself."""

    exit_status = 130
