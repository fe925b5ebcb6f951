"""A worker of a sweep among the others: how it becomes a member and ceases to be one."""

from __future__ import annotations

from typing import cast

from plait.launch.worker import ElasticWorker, Worker

# How long a joiner waits to be made a member: the supervisor ends one that it has no use for.
WAIT_S = 86400.0


class SweepMembers:
    """This worker among the members of a sweep, which may be fixed.

    Where they change, each trains trials of its own, so nobody waits.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = cast("ElasticWorker", worker)
        self._memberships = worker.memberships

    @property
    def can_change(self) -> bool:
        """Whether workers come and go."""
        return self._memberships.can_change

    def join(self) -> None:
        """Become a member; one that joins a running sweep waits until it is made one."""
        if not self.can_change:
            return
        if self._worker.rank < 0:
            self._worker.report_ready()
            self._worker.enter(self._memberships.after(-1, WAIT_S))
        self._worker.report_joined()

    @property
    def is_changed(self) -> bool:
        """Whether there is a version of the members that this worker has not entered."""
        return self._memberships.is_asked

    @property
    def is_leaving(self) -> bool:
        """Whether the others go on without this worker."""
        return self._worker.id not in self._memberships.latest().members

    def enter(self) -> None:
        """Enter the latest version, which this worker is a member of; it keeps its trials."""
        self._worker.enter(self._memberships.latest())
        self._worker.report_joined()

    def leave(self) -> bool:
        """End as a member, without trials, once the others have taken their places.

        False where this worker is a member again, as others were lost meanwhile.
        """
        while self.is_leaving:
            version = self._memberships.latest().version
            if self._memberships.dismissal_or_later(version) is None:
                self._worker.report_left()
                return True
        return False
