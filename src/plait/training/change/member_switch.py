"""From the members of one version to those of the next: the loop's part in it.

Workers that stay close their engine, meet the others of the new version, agree on the state that all go on
from, and open the engine again. Where one is lost meanwhile, they do it again with those that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from plait.comm.collectives import all_gather_values
from plait.launch.membership import Membership
from plait.training.change.members import ElasticMembers, Mark, loss_of

T = TypeVar("T")


class Switched(Protocol):
    """The loop of a run whose members change."""

    def close_engine(self) -> None:
        """End the links to the members before."""

    def mark(self) -> Mark:
        """How far this worker is."""

    def choose_source(self, marks: list[Mark]) -> int | None:
        """The rank whose progress all go on from; None where only a checkpoint has all of the state."""

    def back_to_checkpoint(self) -> None:
        """Go on from the newest checkpoint; all workers call it together."""

    def take_progress(self, source: int, is_there: bool) -> None:
        """Take what rank `source` knows of the run, unless this worker is there already; all call it."""

    def reopen(self, was_lost: bool) -> None:
        """Get ready to take steps among the new members; `was_lost` where the old ones did not agree."""


class MemberSwitch:
    """Takes a loop from one version of the members to the next."""

    def __init__(self, members: ElasticMembers, loop: Switched) -> None:
        self.members = members
        self._loop = loop

    def with_the_rest(self, work: Callable[[], T]) -> T:
        """What `work` returns; where a worker is lost meanwhile, the rest does it again."""
        while True:
            try:
                return work()
            except RuntimeError as failure:
                loss = loss_of(self.members.worker, failure)
                if loss is None:
                    raise
            # Outside of the clause, whose traceback keeps the broken process group alive.
            self.to(partial(self.members.after, loss), was_lost=True)

    def to(self, find: Callable[[], Membership], was_lost: bool = False) -> None:
        """Go on among the members that `find` returns; again with later ones where one is lost meanwhile."""
        members = self.members
        while True:
            try:
                self._loop.close_engine()
                members.enter(find())
                self._agree_on_state()
                self._loop.reopen(was_lost)
                members.report_joined()
                return
            except RuntimeError as failure:
                loss = loss_of(members.worker, failure)
                if loss is None:
                    raise
            find, was_lost = partial(members.after, loss), True

    def _agree_on_state(self) -> None:
        """Go on from the most advanced state that the members have; all of them call it together."""
        worker = self.members.worker
        marks = [self._loop.mark()]
        if worker.world_size > 1:
            marks = [tuple(mark) for mark in all_gather_values(list(marks[0]))]
        source = self._loop.choose_source(marks)
        if source is None:
            self._loop.back_to_checkpoint()
        elif len(set(marks)) > 1:
            self._loop.take_progress(source, marks[worker.rank] == marks[source])
