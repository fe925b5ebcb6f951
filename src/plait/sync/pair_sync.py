"""Synchronous random pairs: after each update every worker averages with the partner of that round."""

from __future__ import annotations

from collections.abc import Sequence

from plait.sync.averaging import GROUP_WAYS, AmongPeers, Peers
from plait.sync.connectivity import pairs
from plait.sync.group_mean import GroupMean
from plait.sync.vector import Source


class PairSync(AmongPeers):
    """Averages with the partner that a random matching of each round gives; all take equally many steps."""

    tolerant = False

    def __init__(self, peers: Peers, sources: Sequence[Source], seed: int) -> None:
        super().__init__(peers, sources)
        self._mean = GroupMean(peers.mail, peers.presence, GROUP_WAYS)
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
