"""Decentralised training: each worker updates its own weights and averages them with others in some way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from plait.cluster.mail import Mail
from plait.cluster.presence import Presence
from plait.sync.group_mean import GroupMean, Ways
from plait.sync.vector import Source, Vector, distance

MEETING = 2
MEETING_WAYS = Ways(3, 4)
GROUP_WAYS = Ways(5, 6)
LOOK_S = 0.02
ATTEMPT_BITS = 8


@dataclass
class Tally:
    """What an averaging has counted since it was last asked: groups, their members, waits and bytes."""

    groups: int = 0
    members: int = 0
    waited_s: float = 0.0
    bytes_sent: int = 0
    distances: list[float] = field(default_factory=list)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time until the end as waited."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - started


class Averaging(Protocol):
    """How workers that update by themselves come to agree.

    `after_update` follows each of this worker's updates; `settle` brings all living workers to the same
    state and returns who they are. In between a worker may end at any time where `tolerant` says so.
    """

    tolerant: bool
    tally: Tally

    def after_update(self) -> None: ...
    def settle(self) -> tuple[int, ...]: ...
    def living(self) -> tuple[int, ...]: ...
    def close(self) -> None: ...


class Meetings:
    """Full averages: all living workers come together, and each leaves with the mean of all.

    A worker that ends or is stopped is not waited for once its lease has run out. All workers have the same
    meetings in the same order; one that missed some takes up what the others have.
    """

    def __init__(self, store: dist.Store, prefix: str, mail: Mail, presence: Presence) -> None:
        self._store = store
        self._prefix = prefix
        self._mail = mail
        self._presence = presence
        self._mean = GroupMean(mail, presence, MEETING_WAYS)
        self._missed = False
        self.number = 0
        self.distance = 0.0

    def has_begun(self) -> bool:
        """Whether some worker waits in the meeting to come."""
        return bool(self._store.check([self._key()]))

    def meet(self, vector: Vector) -> tuple[int, ...]:
        """Average `vector` over all living workers; who they were, this one among them or not."""
        flats = vector.gather()
        before = [flat.clone() for flat in flats]
        for attempt in itertools.count():
            members, behind = self._gather(attempt)
            self._missed = self._mail.rank not in members
            if self._missed:
                break
            number = (self.number << ATTEMPT_BITS) + attempt
            whole = self._mean.average(number, members, flats, behind)
            if self._agree(attempt, members, whole):
                self._missed = not whole
                break
            # Someone who averaged for the others is gone: once more, without it.
            for flat, old in zip(flats, before):
                flat.copy_(old)
        if not self._missed:
            vector.scatter()
        self.distance = distance(vector.weights, before)
        self.number += 1
        return members

    def _agree(self, attempt: int, members: tuple[int, ...], whole: bool) -> bool:
        """Whether all living members have the whole mean; the first that knows says so for all."""
        key = self._key(attempt)
        self._store.set(f"{key}/whole/{self._mail.rank}", str(int(whole)))
        while not self._store.check([f"{key}/verdict"]):
            living = self._living()
            votes = [
                self._store.get(vote) if self._store.check([vote]) else None
                for member in members
                if member in living
                for vote in [f"{key}/whole/{member}"]
            ]
            if None not in votes:
                self._store.compare_set(f"{key}/verdict", "", str(int(b"0" not in votes)))
            else:
                self._mail.wait(0.005)
        return self._store.get(f"{key}/verdict") == b"1"

    def _key(self, attempt: int = 0) -> str:
        return f"{self._prefix}/meeting/{self.number}/{attempt}"

    def _gather(self, attempt: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Enter the meeting and wait until it is closed; its members, and those of them that missed others.

        The record is `open` or `closed` and the ranks that came, with a star at those that missed one.
        """
        key = self._key(attempt)
        me = f"{self._mail.rank}{'*' if self._missed else ''}"
        text = self._store.compare_set(key, "", f"open {me}").decode()
        while text.startswith("open") and me not in text.split():
            text = self._store.compare_set(key, text, f"{text} {me}").decode()
        while text.startswith("open"):
            present = {int(member.strip("*")) for member in text.split()[1:]}
            if self._living() <= present:
                text = self._store.compare_set(key, text, text.replace("open", "closed")).decode()
                self._call(present)
            else:
                self._hear()
                text = self._store.get(key).decode()
        came = text.split()[1:]
        behind = tuple(int(member.strip("*")) for member in came if "*" in member)
        return tuple(sorted(int(member.strip("*")) for member in came)), behind

    def _living(self) -> set[int]:
        for peer in self._mail.peers():
            if self._mail.is_gone(peer):
                self._presence.forget(peer)
        return set(self._presence.living())

    def _call(self, members: set[int]) -> None:
        for member in members - {self._mail.rank}:
            self._mail.send(member, MEETING, self.number, [])

    def _hear(self) -> None:
        self._mail.wait(LOOK_S)
        for peer in self._mail.peers():
            while (message := self._mail.take(peer, MEETING)) is not None:
                message.release()


@dataclass(frozen=True)
class Peers:
    """The other workers as an averaging reaches them: the job's store under a prefix, mail, who is there."""

    store: dist.Store
    prefix: str
    mail: Mail
    presence: Presence


class AmongPeers:
    """What averagings by mail have in common: flat memory of `sources`, and meetings of all who live."""

    def __init__(self, peers: Peers, sources: Sequence[Source]) -> None:
        self.tally = Tally()
        self._mail = peers.mail
        self._presence = peers.presence
        self._vector = Vector(*sources)
        self._meetings = Meetings(peers.store, peers.prefix, peers.mail, peers.presence)

    def settle(self) -> tuple[int, ...]:
        """The mean over all living workers, whom it returns."""
        members = self._meetings.meet(self._vector)
        self.tally.distances.append(self._meetings.distance)
        return members

    def living(self) -> tuple[int, ...]:
        """Who is there, as far as this worker knows."""
        return self._presence.living()

    def close(self) -> None:
        self._presence.close()
        self._mail.close()
