"""Gossip beside the work: AD-PSGD, and pair averaging as KungFu has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from plait.cluster.mail import Mail
from plait.cluster.presence import Presence
from plait.sync.averaging import Meetings, Tally
from plait.sync.connectivity import bipartite_neighbours
from plait.sync.exchange import Exchange
from plait.sync.vector import Source, Vector


class Gossip:
    """Averages with random peers, one at a time, in a thread beside the work."""

    tolerant = True

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        mail: Mail,
        presence: Presence,
        sources: Sequence[Source],
        seed: int,
        *,
        mutual: bool,
    ) -> None:
        self.tally = Tally()
        self._mail = mail
        self._presence = presence
        self._members = presence.members
        self._vector = Vector(*sources)
        self._meetings = Meetings(store, prefix, mail, presence)
        self._averages = 0
        self._exchange = Exchange(mail, presence, self._vector, self._choose, mutual=mutual, seed=seed)

    def _choose(self, living: Sequence[int]) -> Sequence[int]:
        raise NotImplementedError

    def after_update(self) -> None:
        """Make the update known, and take what was averaged since the one before."""
        with self.tally.waiting():
            averages = self._exchange.update()
        self.tally.groups += averages - self._averages
        self.tally.members += 2 * (averages - self._averages)
        self._averages = averages
        self.tally.bytes_sent = self._mail.bytes_sent

    def settle(self) -> tuple[int, ...]:
        """The mean over all living workers, whom it returns."""
        self._exchange.pause()
        members = self._meetings.meet(self._vector)
        self.tally.distances.append(self._meetings.distance)
        self._exchange.resume()
        return members

    def living(self) -> tuple[int, ...]:
        """Who is there, as far as this worker knows."""
        return self._presence.living()

    def close(self) -> None:
        self._exchange.pause()
        self._exchange.close()
        self._presence.close()
        self._mail.close()


class AdPsgd(Gossip):
    """AD-PSGD: workers of even place ask a random neighbour of odd place, and both take the mean."""

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        mail: Mail,
        presence: Presence,
        sources: Sequence[Source],
        seed: int,
        graph: str = "complete",
    ) -> None:
        self._graph = graph
        super().__init__(store, prefix, mail, presence, sources, seed, mutual=True)

    def _choose(self, living: Sequence[int]) -> Sequence[int]:
        # Places are those of the first day: a lost worker must not turn askers into answerers.
        if self._members.index(self._mail.rank) % 2:
            return ()
        neighbours = bipartite_neighbours(self._mail.rank, self._members, self._graph)
        return [peer for peer in neighbours if peer in living]


class PairAveraging(Gossip):
    """Pair averaging: each worker pulls the weights of a random peer and takes the mean of both."""

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        mail: Mail,
        presence: Presence,
        sources: Sequence[Source],
        seed: int,
    ) -> None:
        super().__init__(store, prefix, mail, presence, sources, seed, mutual=False)

    def _choose(self, living: Sequence[int]) -> Sequence[int]:
        return [peer for peer in living if peer != self._mail.rank]
