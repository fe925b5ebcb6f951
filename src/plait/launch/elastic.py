"""The members of a job: what agents report goes to the roster, and what it answers is done."""

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
# For the end of a worker to become known, which explains why others cannot work together.
GRACE_S = 2.0


@dataclass(frozen=True)
class ControlRequest:
    """Somebody wants another number of workers, or other hosts to hold them, or just to know of them.

    The answer is what is wanted and who takes part then, or why not.
    """

    workers: int | None = None
    hosts: tuple[Host, ...] | None = None
    version: int | None = None
    without: tuple[int, ...] = ()
    by: str = "resize"
    why: str = ""
    answer: queue.SimpleQueue[dict[str, Any] | PlaitError] = field(default_factory=queue.SimpleQueue)


class Processes(Protocol):
    """What the supervisor does for its elastic workers."""

    def start_worker(self, start: Start) -> None: ...
    def end_workers(self, workers: tuple[int, ...]) -> None: ...
    def broadcast(self, message: JobMessage) -> None: ...
    def warn(self, words: str) -> None: ...
    def pid_of(self, worker: int) -> int | None: ...


class ElasticWorkers:
    """Keeps the number of workers of a job at the requested one when workers are lost.

    Where the loss of a worker ends the job (`can_change` is False), nothing that workers report changes them.
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

    def serve(self, asked: ControlRequest) -> None:
        """Apply a request to resize, or to show the workers, and answer it."""
        more: dict[str, Any] = {"version": asked.version, "by": asked.by, "why": asked.why}
        try:
            if asked.hosts is not None:
                self.roster.use_hosts(asked.hosts, **more)
            elif asked.workers is not None:
                self.roster.resize(asked.workers, without=asked.without, **more)
        except PlaitError as failure:
            asked.answer.put(failure)
            if asked.by == POLICY:
                self._processes.warn(f"a policy asked for {asked.workers} workers: {failure}")
            return
        asked.answer.put(self._described())
        self.proceed()

    def _described(self) -> dict[str, Any]:
        roster = self.roster
        members = roster.membership.members
        is_reached = len(members) == roster.wanted.workers and not roster.wanted.without & set(members)
        return {
            "workers": roster.wanted.workers,
            "version": roster.wanted.version,
            "members": list(members),
            "pids": {member: self._processes.pid_of(member) for member in members},
            "places": dict(zip(members, roster.membership.hosts)),
            "is_settled": roster.all_joined and is_reached,
            "hosts": {host.name: slots for host, slots in zip(roster.hosts, roster.capacity)},
        }

    @property
    def has_begun(self) -> bool:
        """Whether workers may come, leave and be lost: all of the first version have taken their places."""
        return self.roster.has_begun

    def has_left(self, worker: int) -> bool:
        return worker in self._left

    def on_done(self, worker: int) -> None:
        self.roster.on_done(worker)
        self.proceed()

    def on_progress(self, step: int) -> None:
        self.roster.on_progress(step)

    def on_gone(self, worker: int, why: str) -> None:
        """A worker's process has ended; `why` in words."""
        if not self.has_left(worker):
            self.roster.on_gone(worker, why)
            self.proceed()

    def stop(self) -> None:
        self.roster.stop()

    def is_over(self) -> bool:
        """Whether the job has ended; `too_few` says where it had to, for want of workers."""
        self._form_again_if_due()
        return self.roster.is_over()

    def _form_again_if_due(self) -> None:
        if self._broken is not None and time.monotonic() > self._broken[2] + GRACE_S:
            version, why, _ = self._broken
            self._broken = None
            self._do(self.roster.form_again(version, why))

    def proceed(self) -> None:
        """Do what there is to do now."""
        roster = self.roster
        if roster.all_joined and roster.membership.version > self._joined_version:
            self._joined_version = roster.membership.version
            self._on_joined(roster.membership)
            if leavers := roster.leavers():
                self._processes.broadcast(messages.Dismissal(tuple(leavers)))
        while self._do(roster.next_steps()):
            pass

    def _do(self, steps: NextSteps) -> bool:
        """Do it; whether there was anything."""
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
