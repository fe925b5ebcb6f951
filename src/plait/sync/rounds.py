"""Groups form from whoever is ready: rounds in the job's store, each one record that only ever grows.

A worker that is ready enters the round that is open, or opens the next. Whoever sees that the round may
close closes it, in one atomic step of the store, so it does not matter who that is or whether it lives on;
those in the round learn of it by mail, or look for themselves when no mail comes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch.distributed as dist

from plait.cluster.mail import Mail
from plait.cluster.presence import Presence
from plait.sync.connectivity import Group, cut_off, remembered

CALL = 1  # the channel on which members of a round hear that it is closed
LOOK_S = 0.02
KEPT = 256  # rounds whose records stay in the store


@dataclass(frozen=True)
class Rules:
    """When a round may close.

    `minimum` members at least, unless nobody comes: `patience` times a step is waited for them. Others are
    waited for only when they are expected within `window` times a step, and no longer than that. Every
    `every` rounds all have to be connected.
    """

    minimum: int = 2
    window: float = 0.1
    patience: float = 1.0
    every: int = 10


@dataclass(frozen=True)
class Round:
    """One round: its members in the order they came, who was expected when, and the groups before it.

    `behind` are members whose last round lies so far back that their state counts for nothing.
    """

    number: int
    members: Group = ()
    closed: bool = False
    behind: Group = ()
    expected: tuple[tuple[int, float], ...] = ()
    past: tuple[Group, ...] = ()

    def with_member(self, rank: int, is_behind: bool) -> Round:
        behind = (*self.behind, rank) if is_behind else self.behind
        return replace(self, members=(*self.members, rank), behind=behind)

    def text(self) -> str:
        expected = [[rank, round(t, 4)] for rank, t in self.expected]
        fields = [list(self.members), self.closed, list(self.behind), expected, self.past]
        return json.dumps(fields, separators=(",", ":"))


def read_round(number: int, text: bytes) -> Round:
    members, closed, behind, expected, past = json.loads(text)
    return Round(
        number,
        tuple(members),
        closed,
        tuple(behind),
        tuple((rank, t) for rank, t in expected),
        tuple(tuple(group) for group in past),
    )


def next_round(before: Round | None, number: int, living: int, every: int) -> Round:
    """The round that follows, empty, with what it has to know of those before it."""
    if before is None:
        return Round(number)
    past = remembered([*before.past, before.members], living, every)
    return Round(number, expected=before.expected, past=past)


def with_return(round_: Round, rank: int, at: float) -> Round:
    """The round, told when `rank` is expected back after it."""
    others = tuple((r, t) for r, t in round_.expected if r != rank)
    return replace(round_, expected=(*others, (rank, at)))


def is_behind(round_: Round, rank: int, seen: int | None, every: int) -> bool:
    """Whether `rank`, last in round `seen` (None: it has just started), missed what the others did since."""
    if seen is None or rank in {r for group in round_.past for r in group}:
        return False
    return round_.number - seen > every


def may_close(
    round_: Round, living: Collection[int], waited_s: float, now: float, step_s: float, rules: Rules
) -> bool:
    """Whether the round may close now, as a member sees it that has waited `waited_s` so far."""
    away = set(living) - set(round_.members)
    if not away:
        return True
    if cut_off(round_.past, round_.members, living, rules.every):
        return False
    if len(round_.members) < min(rules.minimum, len(living)):
        return waited_s >= rules.patience * step_s
    window_s = rules.window * step_s
    if waited_s >= window_s:
        return True
    known = dict(round_.expected)
    return not any(abs(known.get(rank, now) - now) <= window_s for rank in away)


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
        self._seen: int | None = None

    def enter(self, step_s: float, hurry: Callable[[], bool] = lambda: False) -> Round:
        """The closed round that this worker became part of, possibly alone.

        `step_s` is how long a step takes here. Where `hurry` says so, the round closes as it is.
        """
        started = time.monotonic()
        round_ = self._join(step_s)
        # Those who came later look less often: the first is likelier to act.
        look_s = max(0.002, min(LOOK_S, self._rules.window * step_s / 4)) * len(round_.members)
        while not round_.closed:
            self._hear(look_s)
            round_ = self._read(round_.number) or self._alone(round_.number)
            if round_.closed:
                break
            waited_s = time.monotonic() - started
            if hurry() or may_close(round_, self._living(), waited_s, time.time(), step_s, self._rules):
                round_ = self._close(round_)
        self._number, self._seen = round_.number + 1, round_.number
        return round_

    def refresh(self) -> None:
        """This worker's state is everyone's again, however many rounds it missed."""
        self._seen = None

    def _alone(self, number: int) -> Round:
        """What is left of a round so long ago that its record is gone: this worker was stopped meanwhile."""
        return Round(number, (self._rank,), closed=True, behind=(self._rank,))

    def _living(self) -> tuple[int, ...]:
        for peer in self._mail.peers():
            if self._mail.is_gone(peer):
                self._presence.forget(peer)
        return self._presence.living()

    def _join(self, step_s: float) -> Round:
        """Enter the first round that is open; the one who completes it closes it in the same step."""
        number = max(self._number, self._hint())
        before = self._read(number - 1) if number else None
        while True:
            living, now = self._living(), time.time()
            mine = self._with_me(next_round(before, number, len(living), self._rules.every), now, step_s)
            found = self._put(mine, "")
            while not found.closed and self._rank not in found.members:
                grown = self._with_me(found, now, step_s)
                grown = replace(grown, closed=may_close(grown, living, 0.0, now, step_s, self._rules))
                found = self._put(grown, found.text())
            if self._rank in found.members:
                if found.closed:
                    self._announce(found)
                return found
            before, number = found, number + 1

    def _with_me(self, round_: Round, now: float, step_s: float) -> Round:
        behind = is_behind(round_, self._rank, self._seen, self._rules.every)
        return with_return(round_.with_member(self._rank, behind), self._rank, now + step_s)

    def _close(self, round_: Round) -> Round:
        """Close it, unless it changed meanwhile: then what it has become."""
        found = self._put(replace(round_, closed=True), round_.text())
        if found.closed:
            self._announce(found)
        return found

    def _announce(self, round_: Round) -> None:
        self._store.set(f"{self._prefix}/hint", str(round_.number + 1))
        if round_.number >= KEPT:
            self._store.delete_key(self._key(round_.number - KEPT))
        for member in round_.members:
            if member != self._rank:
                self._mail.send(member, CALL, round_.number, [], note="closed")

    def _hear(self, seconds: float) -> None:
        """Wait for word that the round is closed, or that somebody is gone."""
        self._mail.wait(seconds)
        for peer in self._mail.peers():
            while (message := self._mail.take(peer, CALL)) is not None:
                message.release()

    def _hint(self) -> int:
        """A round that is not later than the open one: only a place to start looking."""
        return int(self._store.compare_set(f"{self._prefix}/hint", "", "0"))

    def _key(self, number: int) -> str:
        return f"{self._prefix}/round/{number}"

    def _read(self, number: int) -> Round | None:
        key = self._key(number)
        return read_round(number, self._store.get(key)) if self._store.check([key]) else None

    def _put(self, round_: Round, expected: str) -> Round:
        """What the record holds after it was replaced by `round_` where it held `expected`."""
        key = self._key(round_.number)
        return read_round(round_.number, self._store.compare_set(key, expected, round_.text()))
