"""The membership of one worker in a sweep: joining, leaving, and the workers that it trains arrays with."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from plait.adapt.members import BACKEND, loss_of
from plait.core.codec import decode
from plait.core.errors import PeerError
from plait.launcher.membership import Membership
from plait.launcher.worker_process import LaunchedWorker, Worker
from plait.sweeping.array_workers import make_worker_group
from plait.sweeping.settings import SweepSettings
from plait.training.process import join_workers
from plait.training.worker_group import ALONE, WorkerGroup

# Seconds between two questions of a worker that waits for others of its group.
POLL_S = 0.1
# How often a worker's group may break while no member is lost; then the worker ends.
MOST_BREAKS = 5
log = logging.getLogger(__name__)


class SweepMembers:
    """This worker as a member of a sweep, elastic or not.

    Each group of workers trains separate arrays, so a change concerns only those whose group changes.
    """

    def __init__(self, worker: Worker, settings: SweepSettings, device: torch.device) -> None:
        self._worker = cast("LaunchedWorker", worker)
        self._settings = settings
        self._device = device
        self._memberships = worker.memberships
        self._group = ALONE
        # The group whose workers cannot communicate, until the coordinator knows; and in which version, and
        # how often, that happened.
        self._broken: int | None = None
        self._breaks = (0, 0)
        # The version in which this worker waits for others to form a group with.
        self._waits_in: int | None = None

    @property
    def can_change(self) -> bool:
        """Whether the sweep is elastic."""
        return self._memberships.can_change

    def join(self) -> None:
        """Become a member; wait for it if the sweep is already running, join the others if they are fixed."""
        if self._worker.rank < 0:
            self._worker.enter(self._worker.await_membership())
        if not self.can_change and self._trains_with_others:
            join_workers(self._worker, self._device)

    @property
    def _trains_with_others(self) -> bool:
        return self._settings.workers_per_array > 1 or self._settings.train.in_stages

    def find_group(self, settings: SweepSettings) -> WorkerGroup | None:
        """The group that this worker trains with, once all of its workers are free to join it.

        `settings` are those of the sweep, with its sync. None if this worker leaves, or is not needed.
        """
        if not self.can_change:
            if self._trains_with_others:
                self._group = make_worker_group(self._worker, settings, self._device)
            return self._group
        while not (self._is_leaving and self._leave()):
            answer = self._ask(arrives=True)
            if answer["members"] is not None:
                membership = decode(Membership, answer["members"], "members")
                if (group := self._form(membership, settings)) is not None:
                    return group
            elif answer["ends"]:
                return None
            else:
                self._wait_for_others(answer)
        return None

    def _ask(self, arrives: bool) -> Mapping[str, Any]:
        broken, self._broken = self._broken, None
        ends = self._worker.stop_requested()
        question = {"worker": self._worker.id, "arrives": arrives, "ends": ends, "broken": broken}
        return self._worker.ask({"ask": "group", **question})

    def _form(self, membership: Membership, settings: SweepSettings) -> WorkerGroup | None:
        """Connect with the other workers of the group, who all call it; None if one of them is lost."""
        try:
            self._worker.enter(membership)
            if len(membership.members) > 1 or self._settings.train.in_stages:
                self._worker.join(BACKEND)
                self._group = make_worker_group(self._worker, settings, self._device)
            self._worker.report_joined()
            return self._group
        except RuntimeError as failure:
            loss = loss_of(self._worker, failure)
            if loss is None:
                raise
        # Outside the except clause: its traceback keeps the broken process group alive.
        self.leave_group(loss)
        return None

    def _wait_for_others(self, answer: Mapping[str, Any]) -> None:
        """Wait; if there are too few workers for another group, as a member of the latest version."""
        latest = self._memberships.latest()
        if answer["number"] is None and answer["version"] == latest.version != self._waits_in:
            self._waits_in = latest.version
            self._worker.enter(latest)
            self._worker.report_joined()
            if (size := self._settings.workers_per_array) > len(latest.members):
                log.warning("%d workers train an array; waiting for %d", size, size - len(latest.members))
        time.sleep(POLL_S)

    def find_change(self) -> tuple[int, bool] | None:
        """A later version, and whether this worker's group stays together in it; its first worker asks."""
        if not self._memberships.is_asked:
            return None
        answer = self._ask(arrives=False)
        return answer["version"], answer["number"] == self._memberships.current.group

    def stay(self, version: int) -> None:
        """Enter that version with the same group, which keeps its trials."""
        self._memberships.stay(version)
        self._worker.report_joined()

    def leave_group(self, loss: PeerError | None = None) -> None:
        """Disconnect from the others of the group, which has ended or, by `loss`, cannot go on."""
        group, self._group = self._group, ALONE
        with contextlib.suppress(*([] if loss is None else [RuntimeError])):
            group.close()
        if self.can_change:
            self._worker.leave_world()
        elif dist.is_initialized():
            dist.destroy_process_group()
        if loss is not None:
            self._count_break(loss)

    def _count_break(self, loss: PeerError) -> None:
        current = self._memberships.current
        self._broken = current.group
        version, count = self._breaks
        self._breaks = (current.version, count + 1 if version == current.version else 1)
        if self._breaks[1] > MOST_BREAKS:
            raise loss

    @property
    def _is_leaving(self) -> bool:
        """Whether the latest version is without this worker."""
        return self._worker.id not in self._memberships.latest().members

    def _leave(self) -> bool:
        """Leave, without trials, once the other members have joined the latest version.

        False if this worker is a member again, because others were lost.
        """
        while self._is_leaving:
            version = self._memberships.latest().version
            if self._memberships.dismissal_or_later(version) is None:
                return True
        return False
