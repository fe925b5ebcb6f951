"""Partial reduce: after an update a worker averages with the others that are ready."""

from __future__ import annotations

from plait.sync.averaging.base import GROUP_CHANNELS, AveragedState, PeerAveraging
from plait.sync.averaging.group_mean import GroupMean
from plait.sync.averaging.matchmaking import Matchmaking
from plait.sync.averaging.partial_reduce_rules import Round, Rules
from plait.sync.averaging.peers import Peers

# The weight of the newest step in the moving average of the step time.
NEWEST = 0.3
SMALL_BYTES = 1 << 19


class PartialReduce(PeerAveraging):
    """Averages the sources of `averaged` in groups of the workers that are ready.

    Workers that may be in one group share `peers.prefix` in the store; each stage of a pipeline has another.
    `last` is the last round of this worker.
    """

    def __init__(self, peers: Peers, averaged: AveragedState, rules: Rules | None = None) -> None:
        super().__init__(peers, averaged)
        self.last = Round(-1)
        self._rounds = Matchmaking(peers, f"{peers.prefix}/partial", rules)
        self._mean = GroupMean(peers, GROUP_CHANNELS)
        self._left = peers.now()
        self._step_s = 0.0

    def after_update(self) -> None:
        self.average()

    def average(self) -> None:
        """Average with the workers that are ready; returns at once if there are none."""
        arrived = self._peers.now()
        took = arrived - self._left
        self._step_s = took if not self._step_s else self._step_s + NEWEST * (took - self._step_s)
        with self.stats.waiting():
            sent = self._mailbox.bytes_sent
            flats = self._vector.gather()
            weights = self._vector.weights
            small = sum(w.numel() * w.element_size() for w in weights) < SMALL_BYTES
            # The leader averages small models for all; larger ones are split over the members of the group.
            round_ = self._rounds.join(flats if small else (), self._step_s, self.full_average.has_begun)
            if not small and len(round_.members) > 1:
                self._mean.average(round_.number, round_.members, flats, round_.behind)
            if len(round_.members) > 1:
                self._vector.scatter()
        self.last = round_
        self.stats.groups += 1
        self.stats.members += len(round_.members)
        self.stats.bytes_sent += self._mailbox.bytes_sent - sent
        self._left = self._peers.now()

    def synchronize(self) -> None:
        super().synchronize()
        self._rounds.refresh()
        self._left = self._peers.now()
