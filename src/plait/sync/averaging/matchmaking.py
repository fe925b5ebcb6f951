"""Groups of the workers that are ready: rounds in the job's store, each led by the worker that came first.

Where the leader ends or is stopped before it has committed the members, those that joined void the round and
meet in the next one at once. Once it has, all members know who they are, from the leader or from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.comm.links.packing import Message
from plait.comm.tags import Tag
from plait.sync.averaging.flat_buffer import put_mean
from plait.sync.averaging.partial_reduce_rules import (
    VOID,
    Arrival,
    Closed,
    NextStep,
    Open,
    Round,
    Rules,
    may_close,
    next_round,
    next_step,
    read_outcome,
    with_members,
)
from plait.sync.averaging.peers import Inbox, Peers, SharedClock

LOOK_S = 0.02
KEPT = 256  # rounds whose records stay in the store
RECALL = 16  # rounds in a row that may have none
# A leader may itself wait for a member, and names it after one timeout; so its followers wait for two.
LEADER_TIMEOUTS = 2.0


class Matchmaking:
    """This worker's way into rounds; all workers make one over the same store and prefix."""

    def __init__(self, peers: Peers, prefix: str, rules: Rules | None = None) -> None:
        self._peers = peers
        self._store = peers.store
        self._mailbox = peers.mailbox
        self._prefix = prefix
        self._rules = replace(rules or Rules(), hung_s=peers.timeout_s)
        self._rank = peers.rank
        self._clock = SharedClock(peers.now)
        self._up, self._down = Inbox(peers.mailbox, Tag.ROUND_UP), Inbox(peers.mailbox, Tag.ROUND_DOWN)
        self._number = 0
        self._seen = -1

    def join(
        self, flats: Sequence[Tensor], step_s: float, hurry: Callable[[], bool] = lambda: False
    ) -> Round:
        """The round that this worker was part of, possibly alone; `flats` hold its mean.

        `step_s` is how long a step takes here. Where `hurry` says so, a round closes as it is. Flats that
        some lack or have otherwise are averaged over the rest. Without flats only the group is formed.
        """
        number = max(self._number, self._hint())
        self._up.drop_before(number)
        self._down.drop_before(number)
        while True:
            round_ = self._enter(number, flats, step_s, hurry)
            self._number = number + 1
            if round_ is not None:
                self._seen = number
                return round_
            number += 1

    def refresh(self) -> None:
        """This worker's state is everyone's again, however many rounds it missed."""
        self._seen = -1

    def _enter(
        self, number: int, flats: Sequence[Tensor], step_s: float, hurry: Callable[[], bool]
    ) -> Round | None:
        """Open the round or join it; None where it came to nothing for this worker."""
        own = Arrival(self._rank, self._seen, step_s, self._clock.time())
        wanted = Open((own,))
        text = self._store.compare_set(self._key(number), "", wanted.text())
        if text == wanted.text().encode():
            return self._lead(number, own, flats, hurry)
        found = read_outcome(number, text)
        while isinstance(found, Open):
            wanted = found.joined(own)
            text = self._store.compare_set(self._key(number), found.text(), wanted.text())
            if text == wanted.text().encode():
                return self._follow(number, wanted, flats)
            found = read_outcome(number, text)
        return None

    def _lead(
        self, number: int, own: Arrival, flats: Sequence[Tensor], hurry: Callable[[], bool]
    ) -> Round | None:
        """Wait for others, commit the members, and hand out the mean; None where others voided the round."""
        if number >= KEPT:
            self._store.delete_key(self._key(number - KEPT))
        round_ = self._commit(number, own, hurry)
        self._advance_hint(number + 1)
        if round_ is None:
            return None
        if flats:
            self._hand_out(round_, self._collect(round_), flats)
            self._peers.flush()
        else:
            self._announce(round_, round_.members, ())
        return round_

    def _commit(self, number: int, own: Arrival, hurry: Callable[[], bool]) -> Round | None:
        """Close the round as soon as the rules allow; None where it was voided."""
        everyone, every = self._peers.presence.members, self._rules.every
        # As much of the past as is needed should all be there again.
        before = self._before(number)
        if before is not None:
            self._clock.observe(before.time)
        empty = next_round(before, number, len(everyone), every)
        look_s = max(0.002, min(LOOK_S, self._rules.window * own.step_s / 4))
        started = self._peers.now()
        found: Open | Closed | None = Open((own,))
        while isinstance(found, Open):
            for entry in found.entries:
                self._clock.observe(entry.time)
            waited_s, now = self._peers.now() - started, self._clock.time()
            round_ = with_members(empty, found.entries, everyone, now, every)
            living = self._peers.living()
            if may_close(round_, living, waited_s, now, own.step_s, self._rules) or hurry():
                closed = Closed(round_).text()
                text = self._store.compare_set(self._key(number), found.text(), closed)
                if text == closed.encode():
                    return round_
            else:
                self._mailbox.wait(look_s)
                text = self._read(number)
            found = read_outcome(number, text)
        return None

    def _collect(self, round_: Round) -> dict[int, Message]:
        """What the other members handed in; one that ends or is silent for long is left out."""
        found: dict[int, Message] = {}
        missing = set(round_.members) - {self._rank}
        waited = self._peers.stopwatch()
        while True:
            away = {peer for peer in missing if not self._peers.is_there(peer)}
            if away:
                # What someone sent before it went away can still be taken.
                self._mailbox.wait(0.0)
            for peer in sorted(missing):
                if (message := self._up.find(peer, round_.number)) is not None:
                    found[peer] = message
                    waited.restart()
            missing -= found.keys() | away
            if not missing:
                return found
            if waited.is_over():
                raise self._peers.timed_out(waited, missing, f"to hand in its part of round {round_.number}")
            self._mailbox.wait(LOOK_S)

    def _hand_out(self, round_: Round, came: dict[int, Message], flats: Sequence[Tensor]) -> None:
        """Average what the members brought, and send it to each."""
        brought = {rank: message.content.tensors for rank, message in came.items()}
        brought[self._rank] = tuple(flats)
        put_mean(flats, {rank: own for rank, own in brought.items() if rank not in round_.behind})
        for message in came.values():
            message.release()
        self._announce(round_, [self._rank, *came], flats)

    def _announce(self, round_: Round, came: Sequence[int], flats: Sequence[Tensor]) -> None:
        """Send the list of members to all of them and, to those that came, the mean."""
        who = [self._clock.time(), *round_.members, -1, *round_.behind]
        for rank in round_.members:
            if rank != self._rank:
                mean = flats if rank in came else ()
                self._mailbox.send(
                    rank, Tag.ROUND_DOWN, round_.number, [torch.tensor(who, dtype=torch.float64), *mean]
                )

    def _follow(self, number: int, joined: Open, flats: Sequence[Tensor]) -> Round | None:
        """Hand in and take what the leader found; None where it is gone, and the round with it."""
        leader = joined.leader
        for entry in joined.entries:
            self._clock.observe(entry.time)
        # Without flats it only ends the leader's wait.
        self._mailbox.send(leader, Tag.ROUND_UP, number, flats)
        waited = self._peers.stopwatch(LEADER_TIMEOUTS)
        known: Open | Closed | None = joined
        while True:
            there, too_long = self._peers.is_there(leader), waited.is_over()
            # The leader's word is looked for once more after it went away.
            self._mailbox.wait(LOOK_S if there else 0.0)
            if (message := self._down.find(leader, number)) is not None:
                return self._take(message, flats)
            text = self._read(number)
            outcome = read_outcome(number, text)
            if outcome != known:
                known, too_long = outcome, False
                waited.restart()
            match next_step(outcome, self._rank, bool(flats), there, too_long):
                case NextStep.TAKE_PART:
                    assert isinstance(outcome, Closed)
                    return outcome.round
                case NextStep.MAKE_VOID:
                    self._store.compare_set(self._key(number), text.decode(), VOID)
                case NextStep.GO_ON | NextStep.LEAVE:
                    self._advance_hint(number + 1)
                    return None
                case NextStep.COMPLAIN:
                    raise self._peers.timed_out(waited, [leader], f"to hand out the mean of round {number}")

    def _take(self, message: Message, flats: Sequence[Tensor]) -> Round | None:
        """The round that a leader announced, its mean copied to `flats`; None without this worker."""
        announced, *means = message.content.tensors
        assert announced is not None
        time, *ranks = announced.tolist()
        self._clock.observe(time)
        cut = ranks.index(-1)
        members, behind = tuple(map(int, ranks[:cut])), tuple(map(int, ranks[cut + 1 :]))
        for own, mean in zip(flats, means):
            if mean is not None and mean.shape == own.shape:
                own.copy_(mean)
        number = message.content.number
        message.release()
        return Round(number, members, behind) if means or not flats else None

    def _key(self, number: int) -> str:
        return f"{self._prefix}/round/{number}"

    def _read(self, number: int) -> bytes:
        """What the store says of a round that was begun; one that is long deleted came to nothing."""
        return self._store.compare_set(self._key(number), "", VOID)

    def _hint(self) -> int:
        """A round that is not later than the open one: only a place to start looking."""
        return int(self._store.compare_set(f"{self._prefix}/hint", "", "0"))

    def _advance_hint(self, number: int) -> None:
        """Let nobody start looking before `number`; all rounds before it have their outcome."""
        known = self._store.compare_set(f"{self._prefix}/hint", "", str(number))
        while int(known) < number:
            known = self._store.compare_set(f"{self._prefix}/hint", known.decode(), str(number))

    def _before(self, number: int) -> Round | None:
        """The newest round before `number` that was not void."""
        for earlier in range(number - 1, max(-1, number - 1 - RECALL), -1):
            if self._store.check([self._key(earlier)]):
                found = read_outcome(earlier, self._store.get(self._key(earlier)))
                if isinstance(found, Closed):
                    return found.round
        return None
