"""Decentralized training: each worker updates its weights and averages them with those of others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from plait.comm.tags import Tag
from plait.sync.averaging.flat_buffer import FlatBuffer, Source, distance
from plait.sync.averaging.group_mean import ChannelPair, GroupMean
from plait.sync.averaging.peers import Peers

FULL_AVERAGE_CHANNELS = ChannelPair(Tag.FULL_TO_OWNER, Tag.FULL_FROM_OWNER)
GROUP_CHANNELS = ChannelPair(Tag.GROUP_TO_OWNER, Tag.GROUP_FROM_OWNER)
LOOK_S = 0.02
ATTEMPT_BITS = 8
# Votes follow a mean, in which members wait for owners for two timeouts at most.
VOTE_TIMEOUTS = 3.0


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


class Averaging(Protocol):
    """How workers that update separately average their weights.

    `after_update` is called after each update of this worker; `synchronize` gives all live workers the same
    state and returns their ranks. `state` is saved in checkpoints in addition to the workers' state: by name,
    with one tensor per weight, which may be written into.
    """

    stats: SyncStats

    def after_update(self) -> None: ...
    def synchronize(self) -> tuple[int, ...]: ...
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


class AllOrNone:
    """Base of averagings that need all `size` workers: the loss of one raises a PeerError."""

    def __init__(self, size: int) -> None:
        self.stats = SyncStats()
        self._size = size

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        return {}


class FullAverage:
    """Full averages: the mean over all live workers, which all of them wait for.

    Workers that have ended or are not members any more are not waited for. All workers take part in the same
    averages in the same order; a worker that missed some receives the mean of the others.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._store = peers.store
        self._mailbox = peers.mailbox
        self._mean = GroupMean(peers, FULL_AVERAGE_CHANNELS)
        self.missed = False
        # The members of the last average that had missed earlier ones, and so contributed nothing.
        self.behind: tuple[int, ...] = ()
        # Keys of earlier averages, which a worker that was stopped may still read.
        self._stale: list[str] = []
        self.number = 0
        self.distance = 0.0

    def has_begun(self) -> bool:
        """Whether some worker waits in the next full average."""
        return bool(self._store.check([self._key()]))

    def run(self, vector: FlatBuffer) -> tuple[int, ...]:
        """Average `vector` over all live workers; returns their ranks, which may not include this one."""
        flats: list[Tensor] = []
        before: list[Tensor] = []
        for attempt in itertools.count():
            members, behind = self._gather(attempt)
            self.behind = behind
            if attempt == 0:
                self._delete_stale(members)
            self._stale.append(self._key(attempt))
            whole = False
            if self._mailbox.rank in members:
                if not before:
                    flats = vector.gather()
                    before = [flat.clone() for flat in flats]
                number = (self.number << ATTEMPT_BITS) + attempt
                whole = self._mean.average(number, members, flats, behind)
            if self._agree(attempt, members, whole):
                break
            # A worker that averaged for the others is gone: repeat without it.
            for flat, old in zip(flats, before):
                flat.copy_(old)
        self.missed = not whole
        if whole:
            vector.scatter()
        self.distance = distance(vector.weights, before) if whole else 0.0
        self.number += 1
        return members

    def _agree(self, attempt: int, members: tuple[int, ...], whole: bool) -> bool:
        """Whether all live members have the whole mean; the first to know decides for all, in the store.

        A worker that came too late reads the verdict too: if the average is repeated, the others wait for it.
        """
        key = self._key(attempt)
        votes = {member: f"{key}/whole/{member}" for member in members}
        if self._mailbox.rank in members:
            self._store.set(votes[self._mailbox.rank], str(int(whole)))
        waited = self._peers.stopwatch(VOTE_TIMEOUTS)
        while not self._store.check([f"{key}/verdict"]):
            living = self._peers.living()
            present = [member for member in members if member in living]
            missing = [member for member in present if not self._store.check([votes[member]])]
            if not missing:
                have_mean = [self._store.get(votes[member]) == b"1" for member in present]
                self._store.compare_set(f"{key}/verdict", "", str(int(all(have_mean) and bool(present))))
            elif waited.is_over():
                raise self._peers.timed_out(waited, missing, "to confirm the mean of all workers")
            else:
                self._mailbox.wait(0.005)
        return self._store.get(f"{key}/verdict") == b"1"

    def _key(self, attempt: int = 0) -> str:
        return f"{self._peers.prefix}/full-average/{self.number}/{attempt}"

    def _gather(self, attempt: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Join the average and wait until it is closed; returns its members, and which of them missed others.

        The record is `open` or `closed` and the ranks that joined, with a star if they missed an average.
        """
        key = self._key(attempt)
        me = f"{self._mailbox.rank}{'*' if self.missed else ''}"
        text = self._store.compare_set(key, "", f"open {me}").decode()
        while text.startswith("open") and me not in text.split():
            text = self._store.compare_set(key, text, f"{text} {me}").decode()
        waited = self._peers.stopwatch()
        while text.startswith("open"):
            present, known = _ranks(text), text
            missing = self._peers.living() - present
            if not missing:
                text = self._store.compare_set(key, text, text.replace("open", "closed")).decode()
                self._call(present)
            elif waited.is_over():
                raise self._peers.timed_out(waited, missing, "to join a full average")
            else:
                self._receive()
                text = self._store.get(key).decode()
            if text != known:
                waited.restart()
        members = tuple(sorted(_ranks(text)))
        behind = tuple(sorted(int(member.strip("*")) for member in text.split()[1:] if "*" in member))
        # If all missed averages, average what they have.
        return members, behind if behind != members else ()

    def _delete_stale(self, members: tuple[int, ...]) -> None:
        """Delete the keys of earlier averages once all workers have joined a later one or ended."""
        everyone = self._peers.presence.members
        if not set(members) | self._peers.ended() >= set(everyone):
            return
        for key in self._stale if self._mailbox.rank == min(members) else ():
            for name in ("", "/verdict", *(f"/whole/{member}" for member in everyone)):
                self._store.delete_key(f"{key}{name}")
        self._stale = []

    def _call(self, members: set[int]) -> None:
        for member in members - {self._mailbox.rank}:
            self._mailbox.send(member, Tag.FULL_AVERAGE, self.number, [])

    def _receive(self) -> None:
        self._mailbox.wait(LOOK_S)
        for peer in self._mailbox.peers():
            while (message := self._mailbox.take(peer, Tag.FULL_AVERAGE)) is not None:
                message.release()


def _ranks(text: str) -> set[int]:
    """The ranks in the record of an average."""
    return {int(member.strip("*")) for member in text.split()[1:]}


class PeerAveraging:
    """Base of averagings by mailbox: a flat buffer of `sources`, and full averages.

    The first two sources are the weights and the running statistics; with `when_synchronized` they are the
    whole state of a worker.
    """

    def __init__(
        self, peers: Peers, sources: Sequence[Source], when_synchronized: Sequence[WhenSynchronized] = ()
    ) -> None:
        self.stats = SyncStats()
        self._peers = peers
        self._mailbox = peers.mailbox
        self._presence = peers.presence
        self._vector = FlatBuffer(*sources)
        self._when_synchronized = when_synchronized
        self._whole = FlatBuffer(*sources[:2], *when_synchronized)
        self.full_average = FullAverage(peers)

    def synchronize(self) -> tuple[int, ...]:
        """Take the mean over all live workers; returns their ranks."""
        for source in self._when_synchronized:
            source.prepare()
        members = self.full_average.run(self._whole)
        for source in self._when_synchronized:
            source.finish()
        self.stats.distances.append(self.full_average.distance)
        return members

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def close(self) -> None:
        self._mailbox.close()
