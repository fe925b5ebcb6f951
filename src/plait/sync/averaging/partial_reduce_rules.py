"""Decisions about rounds: who takes part in one, when it may close, and what its members do next.

A round is one key of the job's store, and every change of it is one atomic compare-and-set. The first worker
opens it and leads; others join. Then it has exactly one outcome: the leader commits the members, or a
member that no longer waits for the leader voids it. The second to write obeys the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from plait.schema.sync_options import PartialReduceOptions
from plait.sync.averaging.group_graph import Group, cut_off, remembered

VOID = "void"


@dataclass(frozen=True)
class Rules:
    """When a round may close.

    `minimum` members at least: they are waited for when they are expected within `patience` times a step, and
    no longer than that. Others are waited for in the same way within `window` times a step. Every `every`
    rounds all have to be connected; who has to come for that is waited for until it is `overdue` times a
    step late. Where a wait may hold up the very worker that is waited for, as in pipelines, that must be
    finite. Nobody is waited for who is `hung_s` late: it lives, but does not come.
    """

    minimum: int = PartialReduceOptions.minimum
    window: float = PartialReduceOptions.window
    patience: float = PartialReduceOptions.patience
    every: int = PartialReduceOptions.every
    overdue: float = math.inf
    hung_s: float = math.inf


@dataclass(frozen=True)
class Arrival:
    """A worker that came to a round: the last round it was in (-1: none), its step's time, when it came."""

    rank: int
    seen: int
    step_s: float
    time: float

    def text(self) -> str:
        return f"{self.rank}:{self.seen}:{self.step_s:.6g}:{self.time:.6f}"


@dataclass(frozen=True)
class Round:
    """One round: its members, who is expected when, and the groups before it.

    `behind` are members whose last round lies so far back that their state counts for nothing. Times, that of
    the round and those of `expected`, are on the workers' shared clock.
    """

    number: int
    members: Group = ()
    behind: Group = ()
    expected: tuple[tuple[int, float], ...] = ()
    past: tuple[Group, ...] = ()
    time: float = 0.0

    def text(self) -> str:
        """The record of the round once it is closed: what its members and the next round have to know."""
        expected = [[rank, round(t, 4)] for rank, t in self.expected]
        known = [self.members, self.behind, expected, self.past, round(self.time, 4)]
        return json.dumps(known, separators=(",", ":"))


def read_round(number: int, text: str | bytes) -> Round:
    members, behind, expected, past, time = json.loads(text)
    return Round(
        number,
        tuple(members),
        tuple(behind),
        tuple((rank, t) for rank, t in expected),
        tuple(tuple(group) for group in past),
        time,
    )


@dataclass(frozen=True)
class Open:
    """A round that takes members; the first entry leads."""

    entries: tuple[Arrival, ...]

    @property
    def leader(self) -> int:
        return self.entries[0].rank

    def text(self) -> str:
        return " ".join(["open", *(entry.text() for entry in self.entries)])

    def joined(self, entry: Arrival) -> Open:
        return Open((*self.entries, entry))


@dataclass(frozen=True)
class Closed:
    """A round whose members are committed."""

    round: Round

    def text(self) -> str:
        return f"closed {self.round.text()}"


def read_outcome(number: int, text: bytes) -> Open | Closed | None:
    """What the store holds of a round; None where it is void."""
    kind, _, rest = text.decode().partition(" ")
    if kind == VOID:
        return None
    if kind == "closed":
        return Closed(read_round(number, rest))
    found = (entry.split(":") for entry in rest.split(" "))
    return Open(
        tuple(Arrival(int(rank), int(seen), float(step_s), float(t)) for rank, seen, step_s, t in found)
    )


def next_round(before: Round | None, number: int, workers: int, every: int) -> Round:
    """The round that follows, empty, with what it has to know of those before it."""
    if before is None:
        return Round(number)
    past = remembered([*before.past, before.members], workers, every)
    return Round(number, expected=before.expected, past=past)


def with_members(
    empty: Round, entries: Sequence[Arrival], everyone: Collection[int], now: float, every: int
) -> Round:
    """The round with those that came until `now`; of `everyone`, who never did is expected with the first."""
    expected = dict.fromkeys(everyone, entries[0].time) | dict(empty.expected)
    expected |= {entry.rank: now + entry.step_s for entry in entries}
    members = tuple(entry.rank for entry in entries)
    behind = tuple(entry.rank for entry in entries if is_behind(empty, entry.rank, entry.seen, every))
    return Round(
        empty.number,
        members,
        # Where all are, there is nothing better than what they have.
        behind if behind != members else (),
        tuple(expected.items()),
        empty.past,
        now,
    )


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
    parts = cut_off(round_.past, round_.members, living, rules.every)
    if any(_is_awaited(part, known, waited_s, now, step_s, rules) for part in parts):
        return False
    few = len(round_.members) < min(rules.minimum, len(living))
    wait_s = min((rules.patience if few else rules.window) * step_s, rules.hung_s)
    return waited_s >= wait_s or not any(abs(known.get(rank, now) - now) <= wait_s for rank in away)


def _is_awaited(
    part: Collection[int],
    known: Mapping[int, float],
    waited_s: float,
    now: float,
    step_s: float,
    rules: Rules,
) -> bool:
    """Whether someone of a part that is cut off is waited for."""
    late_s = min(now - known.get(rank, now - waited_s) for rank in part)
    if late_s >= rules.hung_s:
        return False
    allowed_s = rules.overdue * step_s
    return waited_s < allowed_s or late_s < allowed_s


class NextStep(Enum):
    """What someone who joined a round does next."""

    WAIT = auto()
    TAKE_PART = auto()  # the members are known, and this worker is one of them
    GO_ON = auto()  # to the next round: this one is void, or closed without this worker
    MAKE_VOID = auto()  # nobody waits for the leader any more; where it has committed, that holds
    LEAVE = auto()  # the leader went away after it committed, and took the mean with it
    COMPLAIN = auto()  # the leader is there and hands out nothing


def next_step(
    outcome: Open | Closed | None, rank: int, brings_mean: bool, leader_there: bool, too_long: bool
) -> NextStep:
    """The next step of `rank`, which joined the round, from what the store says of it.

    `brings_mean` says that the leader averages for all, and hands out the mean; `too_long` that nothing has
    happened for longer than anything may take.
    """
    if isinstance(outcome, Open):
        return NextStep.WAIT if leader_there and not too_long else NextStep.MAKE_VOID
    if outcome is None or rank not in outcome.round.members:
        return NextStep.GO_ON
    if not brings_mean:
        return NextStep.TAKE_PART
    if not leader_there:
        return NextStep.LEAVE
    return NextStep.COMPLAIN if too_long else NextStep.WAIT
