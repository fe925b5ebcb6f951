"""Elastic workers: passes the reports of workers to the roster and executes the steps it returns."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from plait.core.errors import LaunchError, PlaitError
from plait.launch import messages
from plait.launch.membership import Membership
from plait.launch.messages import JobMessage
from plait.launch.roster import NextSteps, Roster, Start
from plait.schema.hosts import Host

POLICY = "policy"
# Wait this long for a worker's exit to be reported, which explains why the others cannot communicate.
GRACE_S = 2.0


@dataclass(frozen=True)
class ControlRequest:
    """A request to change the number of workers or their hosts, or to list the workers.

    `answer` receives the requested state and the current members, or the error.
    """

    workers: int | None = None
    hosts: tuple[Host, ...] | None = None
    version: int | None = None
    without: tuple[int, ...] = ()
    by: str = "resize"
    why: str = ""
    answer: queue.SimpleQueue[dict[str, Any] | PlaitError] = field(default_factory=queue.SimpleQueue)


class Processes(Protocol):
    """The operations on processes that the supervisor provides."""

    def start_worker(self, start: Start) -> None: ...
    def end_workers(self, workers: tuple[int, ...]) -> None: ...
    def broadcast(self, message: JobMessage) -> None: ...
    def warn(self, message: str) -> None: ...
    def pid_of(self, worker: int) -> int | None: ...


class ElasticWorkers:
    """Keeps the number of workers of a job at the requested one when workers are lost.

    If the loss of a worker ends the job (`can_change` is False), reports of workers are ignored.
    """

    def __init__(
        self,
        roster: Roster,
        processes: Processes,
        on_joined: Callable[[Membership], None],
        can_change: bool = True,
    ) -> None:
        self.roster = roster
        self.can_change = can_change
        self._processes = processes
        self._on_joined = on_joined
        self._joined_version = 1
        self._left: set[int] = set()
        self._broken: tuple[int, str, float] | None = None
        self.too_few: str | None = None

    def take(self, report: JobMessage) -> None:
        """Handle the report of a worker."""
        if not self.can_change:
            return
        roster = self.roster
        match report:
            case messages.ReadyReport():
                roster.on_ready(report.rank)
            case messages.JoinReport():
                roster.on_joined(report.rank, report.version)
            case messages.LeaveReport():
                self._left.add(report.rank)
                roster.on_left(report.rank)
            case messages.BreakReport():
                self._broken = self._broken or (report.version, report.why, time.monotonic())
            case messages.ResizeRequest():
                self.serve(ControlRequest(report.workers, by=POLICY, why=report.why))
            case _:
                return
        self.proceed()

    def serve(self, request: ControlRequest) -> None:
        """Apply a request to resize, or to show the workers, and answer it."""
        options: dict[str, Any] = {"version": request.version, "by": request.by, "why": request.why}
        try:
            if request.hosts is not None:
                self.roster.use_hosts(request.hosts, **options)
            elif request.workers is not None:
                self.roster.resize(request.workers, without=request.without, **options)
        except PlaitError as failure:
            request.answer.put(failure)
            if request.by == POLICY:
                self._processes.warn(f"a policy asked for {request.workers} workers: {failure}")
            return
        request.answer.put(self._state())
        self.proceed()

    def _state(self) -> dict[str, Any]:
        roster = self.roster
        members = roster.membership.members
        is_reached = len(members) == roster.target.workers and not roster.target.without & set(members)
        return {
            "workers": roster.target.workers,
            "version": roster.target.version,
            "members": list(members),
            "pids": {member: self._processes.pid_of(member) for member in members},
            "places": dict(zip(members, roster.membership.hosts)),
            "is_settled": roster.all_joined and is_reached,
            "hosts": {host.name: slots for host, slots in zip(roster.hosts, roster.capacity)},
        }

    @property
    def has_begun(self) -> bool:
        """Whether all members of the first version have joined; then workers may join, leave or fail."""
        return self.roster.has_begun

    def has_left(self, worker: int) -> bool:
        return worker in self._left

    def on_done(self, worker: int) -> None:
        self.roster.on_done(worker)
        self.proceed()

    def on_progress(self, step: int) -> None:
        self.roster.on_progress(step)

    def on_gone(self, worker: int, why: str) -> None:
        """Handle the end of a worker's process; `why` is part of messages."""
        if not self.has_left(worker):
            self.roster.on_gone(worker, why)
            self.proceed()

    def stop(self) -> None:
        self.roster.stop()

    def is_over(self) -> bool:
        """Whether the job has ended; `too_few` is the reason if it ended for lack of workers."""
        self._form_again_if_due()
        return self.roster.is_over()

    def _form_again_if_due(self) -> None:
        if self._broken is not None and time.monotonic() > self._broken[2] + GRACE_S:
            version, why, _ = self._broken
            self._broken = None
            self._execute(self.roster.form_again(version, why))

    def proceed(self) -> None:
        """Execute the roster's next steps until there are none."""
        roster = self.roster
        if roster.all_joined and roster.membership.version > self._joined_version:
            self._joined_version = roster.membership.version
            self._on_joined(roster.membership)
            if leavers := roster.leavers():
                self._processes.broadcast(messages.Dismissal(tuple(leavers)))
        while self._execute(roster.next_steps()):
            pass

    def _execute(self, steps: NextSteps) -> bool:
        """Execute `steps`; returns whether the roster may have further ones."""
        for start in steps.start:
            self._processes.start_worker(start)
        if steps.end:
            for worker in steps.end:
                self.roster.on_left(worker)
                self._left.add(worker)
            self._processes.end_workers(steps.end)
        if steps.publish is not None:
            self._broken = None
            self._processes.broadcast(messages.NewMembership(steps.publish))
        if steps.too_few is not None:
            if steps.publish is None:
                raise LaunchError(f"{steps.too_few}; go on with --resume from the newest checkpoint")
            self.too_few = steps.too_few
            self._processes.warn(f"{steps.too_few}; the run ends")
            self._processes.broadcast(messages.Stop())
        return steps.publish is not None or bool(steps.end)
