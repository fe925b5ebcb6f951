"""Decentralized training: each worker updates its weights and averages them with those of others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from plait.comm.tags import Tag
from plait.sync.averaging.flat_buffer import FlatBuffer, Source, distance
from plait.sync.averaging.group_mean import ChannelPair, GroupMean
from plait.sync.averaging.peers import Inbox, Peers

FULL_AVERAGE_CHANNELS = ChannelPair(Tag.FULL_TO_OWNER, Tag.FULL_FROM_OWNER)
GROUP_CHANNELS = ChannelPair(Tag.GROUP_TO_OWNER, Tag.GROUP_FROM_OWNER)


@dataclass
class SyncStats:
    """Counters of an averaging since they were last read: groups, their members, waits and bytes."""

    groups: int = 0
    members: int = 0
    waited_s: float = 0.0
    bytes_sent: int = 0
    distances: list[float] = field(default_factory=list)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - started


class WeightAveraging(Protocol):
    """How workers that update separately average their weights.

    `after_update` is called after each update of this worker; `synchronize` gives all workers the same state,
    and raises PeerError if one is lost. `state` is saved in checkpoints in addition to the workers' state: by
    name, with one tensor per weight, which may be written into.
    """

    stats: SyncStats

    def after_update(self) -> None: ...
    def synchronize(self) -> None: ...
    def state(self) -> Mapping[str, Sequence[Tensor]]: ...
    def close(self) -> None: ...


class WhenSynchronized(Protocol):
    """Tensors that are averaged only when all workers synchronize, such as an optimizer's state.

    They are read once all workers have arrived, and must then have the same number and sizes on all workers.
    """

    def prepare(self) -> None:
        """Called before this worker waits for the others."""

    def __call__(self) -> Sequence[Tensor]: ...

    def finish(self) -> None:
        """Called once the tensors hold the mean over all workers."""


@dataclass(frozen=True)
class AveragedState:
    """What workers average: `sources` after updates, and the rest only when all synchronize.

    The first two sources are the weights and the running statistics; with `when_synchronized` they are the
    whole state of a worker.
    """

    sources: Sequence[Source]
    when_synchronized: Sequence[WhenSynchronized] = ()

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Prepare `when_synchronized` for the average of all workers, which the block takes."""
        for source in self.when_synchronized:
            source.prepare()
        yield
        for source in self.when_synchronized:
            source.finish()


class AllOrNone:
    """Base of averagings that need all `size` workers: the loss of one raises a PeerError."""

    def __init__(self, size: int) -> None:
        self.stats = SyncStats()
        self._size = size

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        return {}


class NoAveraging(AllOrNone):
    """The averaging of a worker that holds no weights."""

    def __init__(self) -> None:
        super().__init__(1)

    def after_update(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


class FullAverage:
    """Full averages: the mean over all workers, which all of them wait for.

    All workers take part in the same averages in the same order. The loss of one raises a PeerError; some of
    the others may have the mean then.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = replace(peers, tolerant=False)
        self._arrivals = Inbox(self._peers, Tag.FULL_AVERAGE)
        self._mean = GroupMean(self._peers, FULL_AVERAGE_CHANNELS)
        self._number = 0

    def has_begun(self) -> bool:
        """Whether some worker waits in the next full average."""
        return any(self._arrivals.has(peer, self._number) for peer in self._peers.mailbox.peers())

    def run(self, vector: FlatBuffer) -> float:
        """Average `vector` over all workers; returns how far the weights moved."""
        self._await_all()
        flats = vector.gather()
        before = [flat.clone() for flat in vector.weights]
        self._mean.average(self._number, self._peers.members, flats)
        vector.scatter()
        self._number += 1
        return distance(vector.weights, before)

    def _await_all(self) -> None:
        others = self._peers.mailbox.peers()
        for peer in others:
            self._peers.mailbox.send(peer, Tag.FULL_AVERAGE, self._number, [])
        for peer in others:
            message = self._arrivals.receive(peer, self._number, 1.0, "to join a full average")
            assert message is not None
            message.release()


class PeerAveraging:
    """Base of averagings by mailbox: a flat buffer of the sources of `averaged`, and full averages."""

    def __init__(self, peers: Peers, averaged: AveragedState) -> None:
        self.stats = SyncStats()
        self._peers = peers
        self._mailbox = peers.mailbox
        self._averaged = averaged
        self._vector = FlatBuffer(*averaged.sources)
        self._whole = FlatBuffer(*averaged.sources[:2], *averaged.when_synchronized)
        self.full_average = FullAverage(peers)

    def synchronize(self) -> None:
        """Take the mean over all workers."""
        with self._averaged.synchronizing():
            self.stats.distances.append(self.full_average.run(self._whole))

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def close(self) -> None:
        self._mailbox.close()
