"""Elastic workers: how the members of one membership version are replaced by those of the next.

The supervisor decides who takes part and makes the versions (`launcher/membership.py`). In a planned change
all members stop after the same step; after a loss they continue from the most advanced state that a member
has. Jobs and loops of users change their members with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from plait.comm.collectives import all_gather_values
from plait.core.errors import PeerError, PlaitError
from plait.core.run_events import WorkersChanged
from plait.launcher.membership import Membership
from plait.launcher.worker_process import LaunchedWorker, Worker
from plait.launcher.workers.worker_failure import as_loss

# The progress of a worker: its step (negative: it holds no state), and how much of what is due after that
# step is done.
ProgressMark = Sequence[int]
NO_STATE: ProgressMark = (-1, 0)
# Its waits for a lost worker can be interrupted. GPU gradients are summed by NCCL (`comm/data_group.py`).
BACKEND = "gloo"


class WorkerLeft(Exception):
    """This worker left the run in a planned change."""


def loss_of(worker: Worker, failure: RuntimeError) -> PeerError | None:
    """The loss of another worker that `failure` reports, if the run can continue without it; else None.

    Once a loss is known, any error of the process group counts as a consequence of it.
    """
    if not worker.memberships.can_change:
        return None
    known = worker.memberships.loss() if worker.rank >= 0 else None
    if known is not None and (isinstance(failure, PeerError) or not isinstance(failure, PlaitError)):
        return known
    return as_loss(failure)


def most_advanced(marks: Sequence[ProgressMark]) -> int:
    """The rank whose state all continue from: at the latest step, the one with most work still due."""
    best = max(range(len(marks)), key=lambda rank: (marks[rank][0], -marks[rank][1], -rank))
    if marks[best][0] < 0:
        raise PlaitError("all workers that held the state of the run are lost; go on with --resume")
    return best


def workers_changed(before: Membership, now: Membership, step: int, seconds: float = 0.0) -> WorkersChanged:
    """The event of a change of members after `step` steps, for which those that stay waited `seconds`."""
    gone, lost = set(before.members) - set(now.members), set(now.lost)
    return WorkersChanged(
        step=step,
        version=now.version,
        members=now.members,
        joined=tuple(sorted(set(now.members) - set(before.members))),
        left=tuple(sorted(gone - lost)),
        lost=tuple(sorted(gone & lost)),
        seconds=seconds,
        by=now.by,
        why=now.why,
    )


class ElasticMembers:
    """The members among which `worker` trains; those of a fixed job never change.

    `join` creates the process group of the members, once `worker` has entered another version.
    """

    def __init__(self, worker: LaunchedWorker, join: Callable[[], None]) -> None:
        self.worker = worker
        self._join = join
        self._memberships = memberships = worker.memberships
        self.can_change = memberships.can_change
        # Whether this worker had yet to become a member.
        self.is_joining = worker.rank < 0
        # When steps stopped for the current change, and the members before it.
        self._since: float | None = None
        self._before: Membership | None = None if self.is_joining else memberships.current

    @property
    def is_asked(self) -> bool:
        """Whether this worker knows of a version to change to."""
        return self._memberships.is_asked

    def pause(self) -> None:
        """Steps stop now for a change."""
        self._since = self._since or time.perf_counter()

    def agree(self) -> Membership:
        """The version to change to, the same on all members, who call it after the same step."""
        self.pause()
        latest = self._memberships.latest().version
        if self.worker.world_size > 1:
            latest = max(all_gather_values(latest))
        return self._memberships.get(latest, self.worker.timeout_s)

    def agree_on_next(self) -> Membership:
        """`agree`, after waiting for a version that was asked for."""
        self.pause()
        self._memberships.after(self._memberships.current.version, self.worker.timeout_s)
        return self.agree()

    def staying(self, membership: Membership) -> list[int]:
        """The current ranks of the members that are also in `membership`."""
        return [
            rank for rank, each in enumerate(self._memberships.current.members) if each in membership.members
        ]

    def after(self, loss: PeerError) -> Membership:
        """The version to continue with after a loss, reported to the supervisor if it may not know."""
        self.pause()
        worker = self.worker
        if not self._memberships.is_asked:
            worker.report_broken(loss)
        return self._memberships.after(self._memberships.current.version, worker.timeout_s)

    def go_on_among(
        self,
        find: Callable[[], Membership],
        close: Callable[[], None],
        take_up: Callable[[bool], None],
        was_lost: bool = False,
    ) -> None:
        """Continue among the members that `find` returns; try again if another one is lost during this.

        Workers that stay `close` what they have opened among the old members, join the process group of the
        new version, and `take_up` the state that all continue from; it is passed whether a worker was lost.
        """
        while True:
            try:
                close()
                self.enter(find())
                take_up(was_lost)
                return
            except RuntimeError as failure:
                loss = loss_of(self.worker, failure)
                if loss is None:
                    raise
            # Outside the except clause: its traceback keeps the broken process group alive.
            find, was_lost = partial(self.after, loss), True

    def enter(self, membership: Membership) -> None:
        """Leave the current process group and join that of `membership`; all of its members call it.

        WorkerLeft if this worker is not one of them.
        """
        worker = self.worker
        worker.leave_world()
        while worker.id not in membership.members:
            # Until all members have joined, this worker may be the only one with the state.
            later = self._memberships.dismissal_or_later(membership.version)
            if later is None:
                raise WorkerLeft
            membership = later
        worker.enter(membership)
        self._join()

    def report_joined(self, step: int) -> WorkersChanged | None:
        """Report to the supervisor that this worker joined the version it entered, after `step` steps.

        Returns the change that ends with it, if this worker was a member before.
        """
        if not self.can_change:
            return None
        self.worker.report_joined()
        now, before, since = self._memberships.current, self._before, self._since
        self._before, self._since = now, None
        if before is None or since is None:
            return None
        return workers_changed(before, now, step, round(time.perf_counter() - since, 6))
