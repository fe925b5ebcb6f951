"""Carries out what the roster of a job decides: workers start, end, join and leave."""

from __future__ import annotations

import time
from collections.abc import Callable

from plait.core.errors import InputError, PlaitError
from plait.launcher import messages
from plait.launcher.display import Display
from plait.launcher.membership_decisions import ControlRequest, NextSteps, Roster
from plait.launcher.supervision.host_agents import HostAgents
from plait.launcher.supervision.worker_states import WorkerStates
from plait.schema.placement import ElasticRules

# After the first report of a lost worker, wait this long for reports that name the cause.
GRACE_S = 2.0
POLICY = "policy"


class MemberChanges:
    """The roster of a launch, and the steps that follow from it."""

    def __init__(
        self, hosts: HostAgents, workers: WorkerStates, display: Display, warn: Callable[[str], None]
    ) -> None:
        self._hosts, self._workers, self._display, self._warn = hosts, workers, display, warn
        placed, rules = hosts.placement.hosts, hosts.placement.elastic
        # A job that is not elastic continues without lost workers if it can; they are not replaced.
        capacity = [0] * len(placed) if rules is None else hosts.capacity()
        self.roster = Roster(placed, capacity, rules or ElasticRules())
        # Why the job ends for lack of members; the report that they cannot communicate, and when it came.
        self.too_few: str | None = None
        self._broken: tuple[messages.BreakReport, float] | None = None

    def control(self, request: ControlRequest, is_stopping: bool) -> None:
        """Answer a request of the control endpoint."""
        if self._hosts.placement.elastic is None:
            request.answer.put(
                InputError("the job's workers are fixed; start it with parallel.elastic: true")
            )
        elif is_stopping and (request.workers or request.hosts):
            request.answer.put(InputError("the job is being stopped; its workers stay as they are"))
        else:
            self._apply(request)

    def resize(self, request: messages.ResizeRequest) -> None:
        """Apply what a policy, or the loop of a script, asks for."""
        self._apply(ControlRequest(request.workers, by=POLICY, why=request.why))

    def leave(self, worker: int) -> None:
        """Go on without a worker that asks for it."""
        if (request := self.roster.without(worker)) is not None:
            self._apply(request)

    def _apply(self, request: ControlRequest) -> None:
        """Apply a request to resize, or to show the workers, and answer it."""
        try:
            self.roster.apply(request)
        except PlaitError as failure:
            request.answer.put(failure)
            if request.by == POLICY:
                self._warn(f"a policy asked for {request.workers} workers: {failure}")
            return
        members = self.roster.membership.members
        request.answer.put({**self.roster.state(), "pids": {m: self._workers[m].pid for m in members}})
        self.proceed()

    def proceed(self) -> None:
        """Execute the roster's next steps until there are none."""
        if (membership := self.roster.newly_joined()) is not None:
            self._display.started(self._workers.shown(membership.members))
            if leavers := self.roster.dismiss():
                self._hosts.broadcast(messages.Dismissal(leavers))
        while (steps := self.roster.next_steps()) != NextSteps():
            self._execute(steps)

    def _execute(self, steps: NextSteps) -> None:
        for start in steps.start:
            self._workers.add(start.worker, self._hosts.name(start.host))
            self._hosts.send(start.host, messages.StartWorker(start.worker, start.slot))
        if steps.end:
            self._hosts.broadcast(messages.EndWorkers(steps.end))
        if steps.publish is not None:
            self._broken = None
            self._hosts.broadcast(messages.NewMembership(steps.publish))
        if steps.too_few is not None:
            self.too_few = steps.too_few
            if steps.publish is None:
                raise self.ended()
            self._warn(f"{steps.too_few}; the run ends")
            self._hosts.broadcast(messages.Stop())

    def ended(self, checkpoint: str = "go on with --resume from the newest checkpoint") -> PlaitError:
        """The error of a job that has too few workers."""
        return self._hosts.failed(f"{self.too_few}; {checkpoint}")

    def break_up(self, report: messages.BreakReport) -> None:
        """Members report that they cannot communicate."""
        self._broken = self._broken or (report, time.monotonic())

    def form_again_if_due(self) -> None:
        """Let members that cannot communicate try again, unless the end of a worker explains it."""
        if self._broken is not None and time.monotonic() > self._broken[1] + GRACE_S:
            (report, _), self._broken = self._broken, None
            self._execute(self.roster.form_again(report.version, report.why))
