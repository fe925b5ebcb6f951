"""Workers that come and go: how those of one version of the membership become those of the next.

Nothing here decides who takes part: the supervisor makes versions (`launch/membership.py`). Members change in
agreement after the same step, or, where one is lost, from the most advanced state that one of them has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from plait.comm.collectives import all_gather_values
from plait.core.errors import PeerError, PlaitError
from plait.core.run_events import WorkersChanged
from plait.launch.membership import Membership, Memberships
from plait.launch.worker import ElasticWorker, Worker, as_loss
from plait.schema.settings import TrainSettings

if TYPE_CHECKING:
    from plait.training.run import Run

# How far a worker is: its step, and how much of what comes between it and the next is done. It holds no state
# below 0.
Mark = Sequence[int]
NO_STATE: Mark = (-1, 0)
# A joiner waits for as long as the job needs to switch to it: the supervisor ends one it has no use for.
WAIT_S = 86400.0
# NCCL gives no way to wake a worker that waits for one that is lost.
BACKEND = "gloo"


class WorkerLeft(Exception):
    """This worker is no member any more, in agreement with the others."""


def loss_of(worker: Worker, failure: RuntimeError) -> PeerError | None:
    """The loss of another worker that `failure` reports, if workers may be lost; else None.

    Once a loss is known, whatever the process group says is a consequence of it.
    """
    if not worker.memberships.can_change:
        return None
    known = worker.memberships.loss() if worker.rank >= 0 else None
    if known is not None and (isinstance(failure, PeerError) or not isinstance(failure, PlaitError)):
        return known
    return as_loss(failure)


def most_advanced(marks: Sequence[Mark]) -> int:
    """The rank whose state all go on from: the latest step, and there what was not done for all."""
    found = max(range(len(marks)), key=lambda rank: (marks[rank][0], -marks[rank][1], -rank))
    if marks[found][0] < 0:
        raise PlaitError("all workers that held the state of the run are lost; go on with --resume")
    return found


def join_members(worker: Worker, settings: TrainSettings) -> None:
    """Make the process group of the members, where this worker is one and anything uses the group."""
    if worker.world_size > 1 or (settings.pipeline is not None and worker.rank >= 0):
        worker.join(BACKEND)


class RunMembers:
    """The members of a run, as its loop sees them; those of a fixed job never change."""

    def __init__(self, run: Run, memberships: Memberships) -> None:
        self._run = run
        self.worker = cast("ElasticWorker", run.worker)
        self._memberships = memberships
        # When steps ended for the change under way, and the members that took the last one.
        self._since: float | None = None
        self._before: Membership | None = None if self.is_joining else memberships.current

    @property
    def can_change(self) -> bool:
        """Whether workers may join and leave."""
        return self._memberships.can_change

    @property
    def is_joining(self) -> bool:
        """Whether this worker has yet to become a member."""
        return self.worker.rank < 0

    def first(self) -> Membership:
        """The first version with this worker, once there is one; the job goes on without it until then."""
        self.worker.report_ready()
        return self._memberships.after(-1, WAIT_S)

    def agree(self) -> Membership:
        """The version to change to; all members call it after the same step and get the same."""
        self._since = self._since or time.perf_counter()
        latest = self._memberships.latest().version
        if self.worker.world_size > 1:
            latest = max(all_gather_values(latest))
        return self._memberships.get(latest, self.worker.timeout_s)

    def staying(self, membership: Membership) -> list[int]:
        """The present ranks of the members that are still there in `membership`."""
        return [
            rank for rank, each in enumerate(self._memberships.current.members) if each in membership.members
        ]

    def after(self, loss: PeerError) -> Membership:
        """The version to continue with after a loss, reported to the supervisor if it may not know."""
        self._since = self._since or time.perf_counter()
        worker = self.worker
        if not self._memberships.is_asked:
            worker.report_broken(loss)
        return self._memberships.after(self._memberships.current.version, worker.timeout_s)

    def enter(self, membership: Membership) -> None:
        """Leave the process group of the members before for that of `membership`; all of them call it.

        WorkerLeft where this worker is not among them.
        """
        worker = self.worker
        worker.leave_world()
        while worker.id not in membership.members:
            # Until the members have taken their places, this worker may be the only one with the state.
            later = self._memberships.dismissal_or_later(membership.version)
            if later is None:
                raise WorkerLeft
            membership = later
        worker.enter(membership)
        join_members(worker, self._run.settings)

    def report_joined(self) -> None:
        """Report to the supervisor that this worker joined the version it entered, and record the change."""
        if not self.can_change:
            return
        self.worker.report_joined()
        now, before, since = self._memberships.current, self._before, self._since
        self._before, self._since = now, None
        if before is None or since is None:
            return
        gone = set(before.members) - set(now.members)
        self._run.metrics.note(
            WorkersChanged(
                step=self._run.trial.step,
                version=now.version,
                members=now.members,
                joined=tuple(sorted(set(now.members) - set(before.members))),
                left=tuple(sorted(gone - set(now.lost))),
                lost=tuple(sorted(gone & set(now.lost))),
                seconds=round(time.perf_counter() - since, 6),
                by=now.by,
                why=now.why,
            )
        )
