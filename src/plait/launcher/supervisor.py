"""The supervisor: starts one agent per host, forwards messages, and decides what to do when workers end.

It imports no torch, so commands start fast.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from plait.core.errors import InputError, LaunchError
from plait.launcher import messages
from plait.launcher.display import Display
from plait.launcher.launchers import Launcher
from plait.launcher.launchers.agent_stream import AgentEnd
from plait.launcher.launchers.choose import launcher_of
from plait.launcher.membership_decisions import ControlRequest
from plait.launcher.messages import (
    COORDINATOR,
    CoordinatorAnswer,
    CoordinatorQuestion,
    Failure,
    JobMessage,
    Launch,
)
from plait.launcher.supervision.host_agents import HostAgents
from plait.launcher.supervision.launch_errors import Interrupted, WorkerError
from plait.launcher.supervision.losses import Losses
from plait.launcher.supervision.member_changes import MemberChanges
from plait.launcher.supervision.stop_signals import handling_stop_signals
from plait.launcher.supervision.worker_states import WorkerStates
from plait.schema.hosts import Host

START_S = 120.0
TICK_S = 0.5
# How often a launcher is asked about its hosts.
LOOK_S = 1.0


class Supervisor:
    """Runs one launch. Ctrl-C or SIGTERM asks the workers to stop cleanly; a second one kills them.

    If workers have nothing to save, the first one kills them.
    """

    def __init__(self, launch: Launch, display: Display, launcher: Launcher | None = None) -> None:
        self._launcher = launcher or launcher_of(launch.placement)
        self._display = display
        # The warnings of the workers and of the supervisor, oldest first.
        self.warnings: list[str] = []
        self._hosts = HostAgents(launch, self._launcher, display)
        self._workers = WorkerStates(launch.placement.hosts, launch.coordinator is not None)
        self._members = MemberChanges(self._hosts, self._workers, display, self._warn)
        self._roster = self._members.roster
        self._losses = Losses(self._hosts, self._workers, self._members, self._warn)
        self._stops = 0
        self._begun = False
        # The hosts that the launcher has offered and that are not used yet.
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
                self._hosts.start(self._roster.membership)
                self._store = self._await_ready()
                prepare()
                # From here on agents forward a request to stop, also to workers that are still starting.
                self._begun = True
                self._hosts.broadcast(messages.StartAll(self._store))
                return self._await_results()
            finally:
                self._hosts.end()

    def exit_status(self, failure: LaunchError) -> int:
        """The status of the worker whose end made the launch fail; that of `failure` if it was no worker."""
        troubled = [state for state in self._workers.ranks if state.trouble_index is not None]
        if isinstance(failure, WorkerError):
            return self._workers[failure.rank].exit_status
        if type(failure) is LaunchError and troubled:  # too few workers are left
            return max(troubled, key=lambda state: state.trouble_index or 0).exit_status
        return failure.exit_status

    def request_stop(self) -> None:
        """Ask the workers to finish their step, write a checkpoint and end. Safe in a signal handler."""
        self._hosts.inbox.put((-1, messages.Stop()))

    def _on_signal(self, number: int) -> None:
        if not self._launcher.signalled(number) and number not in self._launcher.signals:
            self.request_stop()

    def request_control(self, request: ControlRequest) -> None:
        """Queue a request of the control endpoint; may be called from any thread."""
        self._hosts.inbox.put((-1, request))

    def _warn(self, message: str) -> None:
        self._display.printed(f"warning: {message}")
        self.warnings.append(message)

    def _receive(self, end: float) -> tuple[int, JobMessage] | None:
        """The next message of an agent, or None at the time `end`; printed lines are displayed."""
        while True:
            try:
                index, message = self._hosts.inbox.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            match message:
                case messages.Stop():
                    self._on_stop()
                    continue
                case ControlRequest():
                    self._members.control(message, is_stopping=self._stops > 0)
                    continue
                case messages.Signalled():
                    self._launcher.signalled(message.number)
                    continue
            self._hosts.hear(index)
            if not isinstance(message, messages.OutputLine):
                return index, message
            self._hosts.print(index, message)

    def _on_stop(self) -> None:
        self._stops += 1
        if self._stops > 1:
            raise Interrupted(
                "stopped at once, at a second request; the newest checkpoint is the last one written"
            )
        if not self._begun:
            raise Interrupted("stopped before any worker had started; nothing was run")
        if not self._hosts.launch.saves:
            raise Interrupted("stopped at once: these workers save nothing when they are asked to stop")
        self._display.stopping()
        self._roster.stop()
        self._hosts.broadcast(messages.Stop())

    def _await_ready(self) -> str:
        """Wait until every host has accepted the job; returns the address of its store."""
        ready: dict[int, str] = {}
        end = time.monotonic() + START_S
        while len(ready) < len(self._hosts):
            received = self._receive(end)
            if received is None:
                silent = [self._hosts.name(i) for i in range(len(self._hosts)) if i not in ready]
                raise LaunchError(f"no answer from {', '.join(silent)} within {START_S:.0f} s")
            index, message = received
            match message:
                case AgentEnd():
                    self._hosts.lost.add(index)
                    raise self._hosts.failed(self._describe_end(index))
                case messages.CheckFailure():
                    raise LaunchError(self._describe_end(index))
                case messages.Refusal():
                    raise InputError(message.why)
                case messages.HostReady():
                    ready[index] = message.store
        return ready[0]

    def _describe_end(self, index: int) -> str:
        """How an agent has ended, and what it printed."""
        how = self._hosts.describe_end(index)
        # Its last messages may not have been read yet.
        end = time.monotonic() + 0.3
        while self._receive(end) is not None:
            pass
        return f"{how}; it printed:\n{self._hosts.last_lines(index)}"

    def _await_results(self) -> dict[int, Any]:
        self._serve_until(self._losses.is_over)
        if (coordinator := self._workers.coordinator) is not None:
            self._hosts.send(0, messages.CloseCoordinator())
            self._serve_until(lambda: coordinator.done)
        if self._members.too_few is not None:
            raise self._members.ended("a checkpoint was written: go on with --resume")
        return self._workers.results

    def _serve_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            message = self._receive(time.monotonic() + TICK_S)
            if message is not None:
                self._take(*message)
            self._losses.check_agents()
            self._look_at_hosts()
            self._members.proceed()

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
        for name in changes.lost:
            if (index := self._hosts.index_of(name)) is not None:
                self._losses.lose_host(index, self._hosts.describe_loss)
        self._new_hosts += changes.new
        if self._hosts.placement.elastic is not None and self._roster.has_begun and not self._stops:
            while self._new_hosts:
                self._add_host(self._new_hosts.pop())

    def _add_host(self, host: Host) -> None:
        """Start the agent of a new host; workers are started there once it is ready."""
        if self._hosts.is_there(host.name):
            return
        try:
            self._hosts.add(host, self._roster.membership)
        except LaunchError as failure:
            self._warn(f"{failure}; the run goes on without it")
            return
        self._roster.add_host(host)

    def _take(self, index: int, message: JobMessage) -> None:
        match message:
            case AgentEnd():
                self._losses.lose_host(index, self._describe_end)
            case messages.HostReady():  # a new one
                self._hosts.send(index, messages.StartAll(self._store))
                self._roster.open_host(index, self._hosts.placement.capacity[index])
            case messages.Refusal() | messages.CheckFailure():
                why = message.why if isinstance(message, messages.Refusal) else "it cannot run the job"
                self._warn(f"{self._hosts.name(index)} is not used: {why}")
                self._losses.lose_host(index, self._describe_end)
            case messages.UnreachableHost():
                self._losses.lose_host(message.index, self._hosts.describe_link)
            case messages.WorkerPids():
                self._workers.record_pids(message.pids)
                if not self._roster.has_begun and all(state.pid is not None for state in self._workers.ranks):
                    self._display.started(self._workers.shown(range(len(self._workers.ranks))))
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
                self._hosts.send(0, message)
            case CoordinatorAnswer():
                host = self._hosts.index_of(self._workers[message.rank].host)
                assert host is not None
                self._hosts.send(host, message)
            case Failure() | messages.WorkerSilence() | messages.WorkerEnd():
                self._losses.take(message)
            case messages.ReadyReport():
                self._roster.on_ready(message.rank)
            case messages.JoinReport():
                self._roster.on_joined(message.rank, message.version)
            case messages.BreakReport():
                self._members.break_up(message)
            case messages.LeaveRequest(rank):
                self._members.leave(rank)
            case messages.ResizeRequest():
                self._members.resize(message)

    def _record_result(self, rank: int, value: Any) -> None:
        self._workers[rank].done = True
        if rank not in self._roster.left:
            self._workers.results[rank] = value
            if rank != COORDINATOR:
                self._roster.on_done(rank)
