"""Gossip, overlapped with training: AD-PSGD, and KungFu's pair averaging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from plait.schema.sync_options import AdPsgdOptions
from plait.sync.averaging.base import AveragedState, PeerAveraging
from plait.sync.averaging.gossip_thread import GossipThread
from plait.sync.averaging.group_graph import asked_by
from plait.sync.averaging.peers import Peers

Choose = Callable[[Sequence[int]], Sequence[int]]


class Gossip(PeerAveraging):
    """Averages with random peers, one at a time, in a separate thread.

    `choose` selects the peers to ask from the live workers. With `mutual` both workers take the mean,
    otherwise only the one that asks.
    """

    def __init__(
        self, peers: Peers, averaged: AveragedState, seed: int, choose: Choose, *, mutual: bool
    ) -> None:
        super().__init__(peers, averaged)
        self._averages = 0
        self.thread = GossipThread(peers, self._vector, choose, mutual=mutual, seed=seed)

    def after_update(self) -> None:
        """Publish the update, and take the averages since the previous one."""
        with self.stats.waiting():
            averages = self.thread.update()
        self.stats.groups += averages - self._averages
        self.stats.members += 2 * (averages - self._averages)
        self._averages = averages
        self.stats.bytes_sent = self._mailbox.bytes_sent

    def synchronize(self) -> None:
        self.thread.pause()
        super().synchronize()
        self.thread.resume()

    def close(self) -> None:
        self.thread.pause()
        self.thread.close()
        super().close()


def ad_psgd(peers: Peers, averaged: AveragedState, seed: int, graph: str = AdPsgdOptions.graph) -> Gossip:
    """AD-PSGD: workers with an even index ask a random neighbour with an odd one, and both take the mean.

    The index is that among the live workers, so the rest still averages when some are lost. Two workers that
    for a moment disagree on which are live may ask each other: both answer at once, and the global mean is
    preserved.
    """
    choose = partial(asked_by, peers.rank, graph=graph)
    return Gossip(peers, averaged, seed, choose, mutual=True)


def pair_averaging(peers: Peers, averaged: AveragedState, seed: int) -> Gossip:
    """Pair averaging: each worker pulls the weights of a random peer and takes the mean of both."""

    def choose(living: Sequence[int]) -> Sequence[int]:
        return [peer for peer in living if peer != peers.rank]

    return Gossip(peers, averaged, seed, choose, mutual=False)
