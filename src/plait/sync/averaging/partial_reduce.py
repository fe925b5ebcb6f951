"""Partial reduce: after its update a worker averages with whoever is ready too, and waits for nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from plait.sync.averaging.base import GROUP_WAYS, AtSettle, PeerAveraging
from plait.sync.averaging.flat_buffer import Source
from plait.sync.averaging.group_mean import GroupMean
from plait.sync.averaging.matchmaking import Matchmaking
from plait.sync.averaging.peers import Peers
from plait.sync.averaging.round_rules import Round, Rules

# How fast the measured time of a step follows a change.
NEWEST = 0.3
SMALL_BYTES = 1 << 19


class PartialReduce(PeerAveraging):
    """Averages the tensors of `sources` in groups that form from whoever is ready.

    Workers that may be in one group share `prefix` in the store; stages of a pipeline have one each. `last`
    is the round that this worker was in last.
    """

    tolerant = True

    def __init__(
        self,
        peers: Peers,
        sources: Sequence[Source],
        rules: Rules | None = None,
        at_settle: Sequence[AtSettle] = (),
    ) -> None:
        super().__init__(peers, sources, at_settle)
        self.last = Round(-1)
        self._rounds = Matchmaking(peers, f"{peers.prefix}/partial", rules)
        self._mean = GroupMean(peers, GROUP_WAYS)
        self._left = peers.now()
        self._step_s = 0.0

    def after_update(self) -> None:
        self.average()

    def average(self) -> None:
        """Average with whoever is ready; returns when that is done, or nobody came."""
        arrived = self._peers.now()
        took = arrived - self._left
        self._step_s = took if not self._step_s else self._step_s + NEWEST * (took - self._step_s)
        with self.tally.waiting():
            sent = self._mail.bytes_sent
            flats = self._vector.gather()
            weights = self._vector.weights
            small = sum(w.numel() * w.element_size() for w in weights) < SMALL_BYTES
            # The first to come averages few bytes for all; many are shared out once the group is known.
            round_ = self._rounds.take_part(flats if small else (), self._step_s, self.full_average.has_begun)
            if not small and len(round_.members) > 1:
                self._mean.average(round_.number, round_.members, flats, round_.behind)
            if len(round_.members) > 1:
                self._vector.scatter()
        self.last = round_
        self.tally.groups += 1
        self.tally.members += len(round_.members)
        self.tally.bytes_sent += self._mail.bytes_sent - sent
        self._left = self._peers.now()

    def settle(self) -> tuple[int, ...]:
        members = super().settle()
        self._rounds.refresh()
        self._left = self._peers.now()
        return members
