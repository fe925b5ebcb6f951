"""Groups form from whoever is ready: rounds in the job's store, each led by the worker that came first.

A worker that is ready takes a seat in the round that is open, in one atomic step of the store; the first
seat leads. The others hand in what they have and wait for its word; it closes the round, again in one atomic
step, when the rules allow. Where the leader ends or is stopped, those that waited close the round and meet
in the next one at once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from plait.cluster.mail import Mail
from plait.cluster.messages import Message
from plait.cluster.presence import Presence
from plait.sync.connectivity import Group, cut_off, remembered

UP, DOWN = 1, 13
LOOK_S = 0.02
KEPT = 256  # rounds whose records stay in the store
RECALL = 16  # rounds in a row that may have none
CLOSED = 1 << 40  # added to the seats of a round that takes no more
ANSWER_S = 1.0  # for the answer of a round that is closed: its leader may itself have been stopped
GRACE_S = 0.25  # for the word of someone who took a seat, once it may be the one that is gone


@dataclass(frozen=True)
class Rules:
    """When a round may close.

    `minimum` members at least: they are waited for when they are expected within `patience` times a step, and
    no longer than that. Others are waited for in the same way within `window` times a step. Every `every`
    rounds all have to be connected; who has to come for that is waited for until it is `overdue` times a
    step late. Where a wait may hold up the very worker that is waited for, as in pipelines, that must be
    finite.
    """

    minimum: int = 2
    window: float = 0.1
    patience: float = 1.0
    every: int = 10
    overdue: float = math.inf


@dataclass(frozen=True)
class Round:
    """One round: its members, who is expected when, and the groups before it.

    `behind` are members whose last round lies so far back that their state counts for nothing.
    """

    number: int
    members: Group = ()
    behind: Group = ()
    expected: tuple[tuple[int, float], ...] = ()
    past: tuple[Group, ...] = ()

    def text(self) -> str:
        """What the next round has to know of this one."""
        expected = [[rank, round(t, 4)] for rank, t in self.expected]
        return json.dumps([self.members, expected, self.past], separators=(",", ":"))


def read_round(number: int, text: bytes) -> Round:
    members, expected, past = json.loads(text)
    return Round(
        number,
        tuple(members),
        expected=tuple((rank, t) for rank, t in expected),
        past=tuple(tuple(group) for group in past),
    )


def next_round(before: Round | None, number: int, workers: int, every: int) -> Round:
    """The round that follows, empty, with what it has to know of those before it."""
    if before is None:
        return Round(number)
    past = remembered([*before.past, before.members], workers, every)
    return Round(number, expected=before.expected, past=past)


def is_behind(round_: Round, rank: int, seen: int, every: int) -> bool:
    """Whether `rank`, last in round `seen` (-1: it has just started), missed what the others did since."""
    if seen < 0 or rank in {r for group in round_.past for r in group}:
        return False
    return round_.number - seen > every


def may_close(
    round_: Round, living: Collection[int], waited_s: float, now: float, step_s: float, rules: Rules
) -> bool:
    """Whether the round may close now, as a member sees it that has waited `waited_s` so far."""
    away = set(living) - set(round_.members)
    if not away:
        return True
    known = dict(round_.expected)
    late_s = rules.overdue * step_s
    for part in cut_off(round_.past, round_.members, living, rules.every):
        if waited_s < late_s or any(now - known.get(rank, now - waited_s) < late_s for rank in part):
            return False
    few = len(round_.members) < min(rules.minimum, len(living))
    wait_s = (rules.patience if few else rules.window) * step_s
    return waited_s >= wait_s or not any(abs(known.get(rank, now) - now) <= wait_s for rank in away)


@dataclass(frozen=True)
class _Guest:
    """Someone who came to a round: the last round it was in, how long its steps take, what it brought."""

    seen: int
    step_s: float
    message: Message


class Rounds:
    """This worker's way into rounds; all workers make one over the same store and prefix."""

    def __init__(
        self, store: dist.Store, prefix: str, mail: Mail, presence: Presence, rules: Rules | None = None
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._mail = mail
        self._presence = presence
        self._rules = rules or Rules()
        self._rank = mail.rank
        self._number = 0
        self._seen = -1

    def take_part(
        self, flats: Sequence[Tensor], step_s: float, hurry: Callable[[], bool] = lambda: False
    ) -> Round:
        """The round that this worker was part of, possibly alone; `flats` hold its mean.

        `step_s` is how long a step takes here. Where `hurry` says so, a round closes as it is. Flats that
        some lack or have otherwise are averaged over the rest.
        """
        number = max(self._number, self._hint())
        while True:
            seat = self._store.add(self._key(number, "seats"), 1)
            if seat == 1:
                round_ = self._lead(number, flats, step_s, hurry)
            else:
                round_ = self._follow(number, flats, step_s) if seat < CLOSED else None
            if round_ is not None:
                self._number, self._seen = number + 1, number
                return round_
            number += 1

    def refresh(self) -> None:
        """This worker's state is everyone's again, however many rounds it missed."""
        self._seen = -1

    def _lead(
        self, number: int, flats: Sequence[Tensor], step_s: float, hurry: Callable[[], bool]
    ) -> Round | None:
        """Open the round, wait for others, close it, and hand out the mean; None where others closed it."""
        self._store.set(self._key(number, "leader"), str(self._rank))
        # As much of the past as is needed should all be there again.
        empty = next_round(self._before(number), number, len(self._presence.members), self._rules.every)
        guests: dict[int, _Guest] = {}
        started = time.monotonic()
        look_s = max(0.002, min(LOOK_S, self._rules.window * step_s / 4))
        while True:
            self._receive(number, guests)
            round_ = self._with(empty, guests, step_s)
            waited_s = time.monotonic() - started
            if may_close(round_, self._living(), waited_s, time.time(), step_s, self._rules) or hurry():
                break
            if waited_s > LOOK_S and self._store.add(self._key(number, "seats"), 0) >= CLOSED:
                break  # this worker was stopped for so long that the others went on
            self._mail.wait(look_s)
        taken = self._close(number)
        if taken >= CLOSED:
            for guest in guests.values():
                guest.message.release()
            return None
        self._await(number, guests, taken - 1)
        round_ = self._with(empty, guests, step_s)
        self._hand_out(round_, guests, flats)
        self._store.set(self._key(number, "record"), round_.text())
        for name in ("seats", "leader", "record") if number >= KEPT else ():
            self._store.delete_key(self._key(number - KEPT, name))
        return round_

    def _follow(self, number: int, flats: Sequence[Tensor], step_s: float) -> Round | None:
        """Hand in and take what the leader found; None where it is gone, and the round with it."""
        leader = self._leader(number)
        if leader is not None:
            about = torch.tensor([self._seen, step_s], dtype=torch.float64)
            self._mail.send(leader, UP, number, [about, *flats])
            self._mail.flush(1.0)
            if (message := self._hear(leader, number)) is not None:
                return _taken(message, flats)
        self._close(number)
        return None

    def _hear(self, leader: int, number: int) -> Message | None:
        """What the leader hands out; None where it is gone, or handed out without this worker."""
        void_at = math.inf
        while time.monotonic() < void_at:
            message = self._mail.take(leader, DOWN)
            if message is not None and message.content.number == number:
                return message
            if message is not None:
                message.release()
            elif self._mail.is_gone(leader) or leader not in self._presence.living():
                return None
            else:
                self._mail.wait(LOOK_S)
                if void_at == math.inf and self._is_over(number):
                    void_at = time.monotonic() + ANSWER_S
        return None

    def _is_over(self, number: int) -> bool:
        """Whether the round is closed, so that its answer is on its way, or so long ago that it is gone."""
        seats = self._store.add(self._key(number, "seats"), 0)
        return seats < 2 or seats >= CLOSED

    def _leader(self, number: int) -> int | None:
        key, end = self._key(number, "leader"), time.monotonic() + GRACE_S
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            self._mail.wait(0.001)
        return int(self._store.get(key))

    def _receive(self, number: int, guests: dict[int, _Guest]) -> None:
        """Take what has arrived for this round; what is older is void."""
        for peer in self._mail.peers():
            while (message := self._mail.take(peer, UP)) is not None:
                about = message.content.tensors[0]
                if message.content.number != number or about is None:
                    message.release()
                    continue
                seen, step_s = about.tolist()
                guests[peer] = _Guest(int(seen), step_s, message)

    def _await(self, number: int, guests: dict[int, _Guest], count: int) -> None:
        """Wait for all that took a seat; one that is missing for long may be one that is gone."""
        end = time.monotonic() + GRACE_S
        while len(guests) < count and (time.monotonic() < end or self._all_are_there()):
            self._mail.wait(LOOK_S)
            self._receive(number, guests)

    def _all_are_there(self) -> bool:
        return len(self._living()) == len(self._presence.members)

    def _with(self, empty: Round, guests: dict[int, _Guest], step_s: float) -> Round:
        """The round as it is now."""
        every = self._rules.every
        seen = {self._rank: self._seen, **{rank: guest.seen for rank, guest in guests.items()}}
        steps = {self._rank: step_s, **{rank: guest.step_s for rank, guest in guests.items()}}
        now = time.time()
        return Round(
            empty.number,
            tuple(seen),
            tuple(rank for rank in seen if is_behind(empty, rank, seen[rank], every)),
            (
                *((rank, t) for rank, t in empty.expected if rank not in steps),
                *((rank, now + seconds) for rank, seconds in steps.items()),
            ),
            empty.past,
        )

    def _hand_out(self, round_: Round, guests: dict[int, _Guest], flats: Sequence[Tensor]) -> None:
        """Average what the members brought, in the order of ranks, and send it to each."""
        counts = [0 if self._rank in round_.behind else 1 for _ in flats]
        for rank in sorted(guests):
            tensors = guests[rank].message.content.tensors[1:]
            for i, (own, theirs) in enumerate(zip(flats, tensors)):
                if theirs is not None and theirs.shape == own.shape and rank not in round_.behind:
                    own.add_(theirs) if counts[i] else own.copy_(theirs)
                    counts[i] += 1
            guests[rank].message.release()
        for own, count in zip(flats, counts):
            own.div_(max(count, 1))
        who = torch.tensor([*round_.members, -1, *round_.behind])
        for rank in guests:
            self._mail.send(rank, DOWN, round_.number, [who, *flats])
        self._mail.flush(1.0)

    def _living(self) -> tuple[int, ...]:
        for peer in self._mail.peers():
            if self._mail.is_gone(peer):
                self._presence.forget(peer)
        return self._presence.living()

    def _close(self, number: int) -> int:
        """Take no more into the round; the seats taken until now, more than `CLOSED` where it was closed."""
        taken = self._store.add(self._key(number, "seats"), CLOSED) - CLOSED
        self._store.set(f"{self._prefix}/hint", str(number + 1))
        return int(taken)

    def _hint(self) -> int:
        """A round that is not later than the open one: only a place to start looking."""
        return int(self._store.compare_set(f"{self._prefix}/hint", "", "0"))

    def _key(self, number: int, name: str) -> str:
        return f"{self._prefix}/{name}/{number}"

    def _before(self, number: int) -> Round | None:
        """The newest round before `number` that is written down; one whose leader was lost never is."""
        end = time.monotonic() + LOOK_S
        # The last one may be closed and just about to be.
        while number and not self._store.check([self._key(number - 1, "record")]) and time.monotonic() < end:
            self._mail.wait(0.001)
        for earlier in range(number - 1, max(-1, number - 1 - RECALL), -1):
            key = self._key(earlier, "record")
            if self._store.check([key]):
                return read_round(earlier, self._store.get(key))
        return None


def _taken(message: Message, flats: Sequence[Tensor]) -> Round:
    """The round that a leader tells of, with the means that it found put into `flats`."""
    who, *means = message.content.tensors
    assert who is not None
    ranks = who.tolist()
    cut = ranks.index(-1)
    for own, mean in zip(flats, means):
        if mean is not None and mean.shape == own.shape:
            own.copy_(mean)
    message.release()
    return Round(message.content.number, tuple(ranks[:cut]), tuple(ranks[cut + 1 :]))
