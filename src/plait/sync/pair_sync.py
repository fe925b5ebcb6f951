"""Synchronous random pairs: after each update every worker averages with the partner of that round."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from plait.cluster.mail import Mail
from plait.cluster.presence import Presence
from plait.sync.averaging import GROUP_WAYS, Meetings, Tally
from plait.sync.connectivity import pairs
from plait.sync.group_mean import GroupMean
from plait.sync.vector import Source, Vector


class PairSync:
    """Averages with the partner that a random matching of each round gives; all take equally many steps."""

    tolerant = False

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        mail: Mail,
        presence: Presence,
        sources: Sequence[Source],
        seed: int,
    ) -> None:
        self.tally = Tally()
        self._mail = mail
        self._presence = presence
        self._vector = Vector(*sources)
        self._mean = GroupMean(mail, presence, GROUP_WAYS)
        self._meetings = Meetings(store, prefix, mail, presence)
        self._seed = seed
        self._round = 0

    def after_update(self) -> None:
        """Average with this round's partner, and wait for it."""
        partner = pairs(self._seed, self._round, self._presence.members).get(self._mail.rank)
        if partner is not None:
            with self.tally.waiting():
                self._vector.gather()
                self._mean.average(self._round, [self._mail.rank, partner], self._vector.flats)
                self._vector.scatter()
        self._round += 1
        self.tally.groups += 1
        self.tally.members += 1 if partner is None else 2
        self.tally.bytes_sent = self._mail.bytes_sent

    def settle(self) -> tuple[int, ...]:
        """The mean over all workers, whom it returns."""
        members = self._meetings.meet(self._vector)
        self.tally.distances.append(self._meetings.distance)
        return members

    def living(self) -> tuple[int, ...]:
        """Who is there, as far as this worker knows."""
        return self._presence.living()

    def close(self) -> None:
        self._presence.close()
        self._mail.close()
