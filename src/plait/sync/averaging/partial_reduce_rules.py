"""Pure rules of rounds: which workers are in a round, when it may close, and what its members do next.

A round is one key of the job's store, and every change of it is one atomic compare-and-set. The first worker
opens it and leads; others join. Then it has exactly one outcome, which the first write decides: the leader
commits the members, or a member that no longer waits for the leader voids it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from plait.schema.sync_options import PartialReduceOptions
from plait.sync.averaging.group_graph import Group, disconnected, remembered

VOID = "void"


@dataclass(frozen=True)
class Rules:
    """When a round may close; times are in steps.

    `minimum`: the members of the smallest group. `patience`: the longest wait while there are fewer, for
    workers that are expected within that time. `window`: the same once there are enough. `every`: the number
    of rounds within which all workers have to be connected. `overdue`: how late a worker that is needed for
    this may be; finite if waiting may block that worker itself, as in pipelines. `hung_s`: how many seconds
    late a worker is that is not waited for.
    """

    minimum: int = PartialReduceOptions.minimum
    window: float = PartialReduceOptions.window
    patience: float = PartialReduceOptions.patience
    every: int = PartialReduceOptions.every
    overdue: float = math.inf
    hung_s: float = math.inf


@dataclass(frozen=True)
class Arrival:
    """A worker that joined a round: its last round (-1: none), its step time, and when it joined."""

    rank: int
    seen: int
    step_s: float
    time: float

    def text(self) -> str:
        return f"{self.rank}:{self.seen}:{self.step_s:.6g}:{self.time:.6f}"


@dataclass(frozen=True)
class Round:
    """One round: its members, when workers are expected, and the groups before it.

    `behind` are members whose last round was so long ago that their state is ignored. Times, that of the
    round and those of `expected`, are on the workers' shared clock.
    """

    number: int
    members: Group = ()
    behind: Group = ()
    expected: tuple[tuple[int, float], ...] = ()
    past: tuple[Group, ...] = ()
    time: float = 0.0

    def text(self) -> str:
        """The record of the closed round in the store, for its members and the next round."""
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
    """A round that workers can join; the first entry leads."""

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
    """Parse the record of a round in the store; None if it is void."""
    kind, _, rest = text.decode().partition(" ")
    if kind == VOID:
        return None
    if kind == "closed":
        return Closed(read_round(number, rest))
    fields = (entry.split(":") for entry in rest.split(" "))
    return Open(
        tuple(Arrival(int(rank), int(seen), float(step_s), float(t)) for rank, seen, step_s, t in fields)
    )


def next_round(before: Round | None, number: int, workers: int, every: int) -> Round:
    """The next round, without members, with the expected times and groups of the rounds before."""
    if before is None:
        return Round(number)
    past = remembered([*before.past, before.members], workers, every)
    return Round(number, expected=before.expected, past=past)


def with_members(
    empty: Round, entries: Sequence[Arrival], everyone: Collection[int], now: float, every: int
) -> Round:
    """The round with the workers that joined until `now`.

    Workers of `everyone` that were never in a round are expected at the time of the first entry.
    """
    expected = dict.fromkeys(everyone, entries[0].time) | dict(empty.expected)
    expected |= {entry.rank: now + entry.step_s for entry in entries}
    members = tuple(entry.rank for entry in entries)
    behind = tuple(entry.rank for entry in entries if is_behind(empty, entry.rank, entry.seen, every))
    return Round(
        empty.number,
        members,
        # If all are behind, average what they have.
        behind if behind != members else (),
        tuple(expected.items()),
        empty.past,
        now,
    )


def is_behind(round_: Round, rank: int, seen: int, every: int) -> bool:
    """Whether `rank`, last in round `seen` (-1: it has just started), has missed too many rounds."""
    if seen < 0 or rank in {r for group in round_.past for r in group}:
        return False
    return round_.number - seen > every


def may_close(
    round_: Round, living: Collection[int], waited_s: float, now: float, step_s: float, rules: Rules
) -> bool:
    """Whether the round may close now, after its leader has waited `waited_s`."""
    away = set(living) - set(round_.members)
    if not away:
        return True
    known = dict(round_.expected)
    parts = disconnected(round_.past, round_.members, living, rules.every)
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
    """Whether to wait for a member of the disconnected component `part`."""
    late_s = min(now - known.get(rank, now - waited_s) for rank in part)
    if late_s >= rules.hung_s:
        return False
    allowed_s = rules.overdue * step_s
    return waited_s < allowed_s or late_s < allowed_s


class NextStep(Enum):
    """What a worker that joined a round does next."""

    WAIT = auto()
    TAKE_PART = auto()  # the members are known, and this worker is one of them
    GO_ON = auto()  # to the next round: this one is void, or closed without this worker
    MAKE_VOID = auto()  # the leader is lost; no effect if it has committed the members
    LEAVE = auto()  # the leader was lost after it committed, so there is no mean
    COMPLAIN = auto()  # the leader is live but does not send the mean in time


def next_step(
    outcome: Open | Closed | None, rank: int, brings_mean: bool, leader_there: bool, too_long: bool
) -> NextStep:
    """The next step of `rank`, which joined the round, for the outcome in the store.

    With `brings_mean` the leader averages for all and sends the mean; `too_long` means that there was no
    progress within the timeout.
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
