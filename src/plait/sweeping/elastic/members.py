"""The membership of one worker in an elastic sweep: joining and leaving."""

from __future__ import annotations

from typing import cast

from plait.launch.worker_process import LaunchedWorker, Worker


class SweepMembers:
    """This worker as a member of a sweep, elastic or not.

    In an elastic sweep each worker trains separate arrays, so changes need no synchronization.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = cast("LaunchedWorker", worker)
        self._memberships = worker.memberships

    @property
    def can_change(self) -> bool:
        """Whether the sweep is elastic."""
        return self._memberships.can_change

    def join(self) -> None:
        """Become a member; wait for it if the sweep is already running."""
        if not self.can_change:
            return
        if self._worker.rank < 0:
            self._worker.enter(self._worker.await_membership())
        self._worker.report_joined()

    @property
    def is_changed(self) -> bool:
        """Whether there is a newer membership version."""
        return self._memberships.is_asked

    @property
    def is_leaving(self) -> bool:
        """Whether the latest version is without this worker."""
        return self._worker.id not in self._memberships.latest().members

    def enter(self) -> None:
        """Enter the latest version, which this worker is a member of; it keeps its trials."""
        self._worker.enter(self._memberships.latest())
        self._worker.report_joined()

    def leave(self) -> bool:
        """Leave, without trials, once the other members have joined the latest version.

        False if this worker is a member again, because others were lost.
        """
        while self.is_leaving:
            version = self._memberships.latest().version
            if self._memberships.dismissal_or_later(version) is None:
                return True
        return False
