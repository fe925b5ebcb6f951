"""Synchronous random pairs: after each update every worker averages with the partner of that round."""

from __future__ import annotations

from plait.sync.averaging.base import GROUP_CHANNELS, AveragedState, PeerAveraging
from plait.sync.averaging.group_graph import pairs
from plait.sync.averaging.group_mean import GroupMean
from plait.sync.averaging.peers import Peers


class PairSync(PeerAveraging):
    """Averages with the partner in a random matching of each round; all workers take the same steps.

    Rounds are counted from the run's first step; `first` is the next one.
    """

    def __init__(self, peers: Peers, averaged: AveragedState, seed: int, first: int = 0) -> None:
        super().__init__(peers, averaged)
        self._mean = GroupMean(peers, GROUP_CHANNELS)
        self._seed = seed
        self._round = first

    def after_update(self) -> None:
        """Average with this round's partner, and wait for it."""
        partner = pairs(self._seed, self._round, self._peers.members).get(self._mailbox.rank)
        if partner is not None:
            with self.stats.waiting():
                self._vector.gather()
                self._mean.average(self._round, [self._mailbox.rank, partner], self._vector.flats)
                self._vector.scatter()
        self._round += 1
        self.stats.groups += 1
        self.stats.members += 1 if partner is None else 2
        self.stats.bytes_sent = self._mailbox.bytes_sent
