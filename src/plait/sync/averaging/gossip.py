"""Gossip, overlapped with training: AD-PSGD, and pair averaging as KungFu has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.schema.sync_options import AdPsgdOptions
from plait.sync.averaging.base import PeerAveraging, WhenSynchronized
from plait.sync.averaging.flat_buffer import Source
from plait.sync.averaging.gossip_thread import GossipThread
from plait.sync.averaging.group_graph import asked_by
from plait.sync.averaging.peers import Peers

Choose = Callable[[Sequence[int]], Sequence[int]]


class Gossip(PeerAveraging):
    """Averages with random peers, one at a time, in a thread of its own.

    `choose` says who of the living may be asked; with `mutual` both take the mean, else only who asks.
    """

    def __init__(
        self,
        peers: Peers,
        sources: Sequence[Source],
        seed: int,
        choose: Choose,
        *,
        mutual: bool,
        when_synchronized: Sequence[WhenSynchronized] = (),
    ) -> None:
        super().__init__(peers, sources, when_synchronized)
        self._averages = 0
        self.thread = GossipThread(
            peers.mailbox, peers.presence, self._vector, choose, mutual=mutual, seed=seed
        )

    def after_update(self) -> None:
        """Make the update known, and take what was averaged since the one before."""
        with self.stats.waiting():
            averages = self.thread.update()
        self.stats.groups += averages - self._averages
        self.stats.members += 2 * (averages - self._averages)
        self._averages = averages
        self.stats.bytes_sent = self._mailbox.bytes_sent

    def synchronize(self) -> tuple[int, ...]:
        self.thread.pause()
        members = super().synchronize()
        self.thread.resume()
        return members

    def close(self) -> None:
        self.thread.pause()
        self.thread.close()
        super().close()


def ad_psgd(
    peers: Peers,
    sources: Sequence[Source],
    seed: int,
    graph: str = AdPsgdOptions.graph,
    when_synchronized: Sequence[WhenSynchronized] = (),
) -> Gossip:
    """AD-PSGD: workers of even place ask a random neighbour of odd place, and both take the mean.

    Places are those among the living, so that the rest goes on averaging when some are lost. Two workers that
    for a moment disagree on who lives may ask each other: both answer at once, and the mean of all stays.
    """

    def choose(living: Sequence[int]) -> Sequence[int]:
        return asked_by(peers.rank, living, graph)

    return Gossip(peers, sources, seed, choose, mutual=True, when_synchronized=when_synchronized)


def pair_averaging(
    peers: Peers, sources: Sequence[Source], seed: int, when_synchronized: Sequence[WhenSynchronized] = ()
) -> Gossip:
    """Pair averaging: each worker pulls the weights of a random peer and takes the mean of both."""

    def choose(living: Sequence[int]) -> Sequence[int]:
        return [peer for peer in living if peer != peers.rank]

    return Gossip(peers, sources, seed, choose, mutual=False, when_synchronized=when_synchronized)
