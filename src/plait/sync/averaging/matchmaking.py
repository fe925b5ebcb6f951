"""Groups of the workers that are ready: rounds in the job's store, each led by the first worker to join.

If the leader ends or is stopped before it has committed the members, those that joined void the round and
join the next one at once. Afterwards all members know the group, from the leader or from the store.
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
# A leader may itself wait for a member, and fails after one timeout, so the others wait for two.
LEADER_TIMEOUTS = 2.0


class Matchmaking:
    """Joins rounds for this worker; all workers create one with the same store and prefix."""

    def __init__(self, peers: Peers, prefix: str, rules: Rules | None = None) -> None:
        self._peers = peers
        self._store = peers.store
        self._mailbox = peers.mailbox
        self._prefix = prefix
        self._rules = replace(rules or Rules(), hung_s=peers.timeout_s)
        self._rank = peers.rank
        self._clock = SharedClock(peers.now)
        self._up, self._down = Inbox(peers, Tag.ROUND_UP), Inbox(peers, Tag.ROUND_DOWN)
        self._number = 0
        self._seen = -1

    def join(
        self, flats: Sequence[Tensor], step_s: float, hurry: Callable[[], bool] = lambda: False
    ) -> Round:
        """Take part in a round, possibly alone, and return it; `flats` then hold its mean.

        `step_s` is this worker's step time. If `hurry` returns True, the round closes without waiting. Flats
        that are missing or differ in size on some members are averaged over the rest. Without flats only the
        group is formed.
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
        """Forget missed rounds: this worker's state is the same as that of the others."""
        self._seen = -1

    def _enter(
        self, number: int, flats: Sequence[Tensor], step_s: float, hurry: Callable[[], bool]
    ) -> Round | None:
        """Open or join the round; None if it is void, or closed without this worker."""
        arrival = Arrival(self._rank, self._seen, step_s, self._clock.time())
        proposal = Open((arrival,))
        text = self._store.compare_set(self._key(number), "", proposal.text())
        if text == proposal.text().encode():
            return self._lead(number, arrival, flats, hurry)
        outcome = read_outcome(number, text)
        while isinstance(outcome, Open):
            proposal = outcome.joined(arrival)
            text = self._store.compare_set(self._key(number), outcome.text(), proposal.text())
            if text == proposal.text().encode():
                return self._follow(number, proposal, flats)
            outcome = read_outcome(number, text)
        return None

    def _lead(
        self, number: int, arrival: Arrival, flats: Sequence[Tensor], hurry: Callable[[], bool]
    ) -> Round | None:
        """Wait for others, commit the members, and send them the mean; None if others voided the round."""
        if number >= KEPT:
            self._store.delete_key(self._key(number - KEPT))
        round_ = self._commit(number, arrival, hurry)
        self._advance_hint(number + 1)
        if round_ is None:
            return None
        if flats:
            self._send_mean(round_, self._collect(round_), flats)
        else:
            self._announce(round_, round_.members, ())
        return round_

    def _commit(self, number: int, arrival: Arrival, hurry: Callable[[], bool]) -> Round | None:
        """Close the round as soon as the rules allow; None if it was voided."""
        everyone, every = self._peers.members, self._rules.every
        # Enough earlier groups for the case that all workers are live again.
        before = self._before(number)
        if before is not None:
            self._clock.observe(before.time)
        empty = next_round(before, number, len(everyone), every)
        look_s = max(0.002, min(LOOK_S, self._rules.window * arrival.step_s / 4))
        started = self._peers.now()
        outcome: Open | Closed | None = Open((arrival,))
        while isinstance(outcome, Open):
            for entry in outcome.entries:
                self._clock.observe(entry.time)
            waited_s, now = self._peers.now() - started, self._clock.time()
            round_ = with_members(empty, outcome.entries, everyone, now, every)
            living = self._peers.living()
            if may_close(round_, living, waited_s, now, arrival.step_s, self._rules) or hurry():
                closed = Closed(round_).text()
                text = self._store.compare_set(self._key(number), outcome.text(), closed)
                if text == closed.encode():
                    return round_
            else:
                self._mailbox.wait(look_s)
                text = self._read(number)
            outcome = read_outcome(number, text)
        return None

    def _collect(self, round_: Round) -> dict[int, Message]:
        """The tensors of the other members; members that are not live any more are left out."""
        received: dict[int, Message] = {}
        missing = set(round_.members) - {self._rank}
        waited = self._peers.stopwatch()
        while True:
            away = {peer for peer in missing if not self._peers.is_there(peer)}
            if away:
                # Messages that it sent before can still be received.
                self._mailbox.wait(0.0)
            for peer in sorted(missing):
                if (message := self._up.find(peer, round_.number)) is not None:
                    received[peer] = message
                    waited.restart()
            missing -= received.keys() | away
            if not missing:
                return received
            if waited.is_over():
                raise self._peers.timed_out(waited, missing, f"to send its part of round {round_.number}")
            self._mailbox.wait(LOOK_S)

    def _send_mean(self, round_: Round, came: dict[int, Message], flats: Sequence[Tensor]) -> None:
        """Average the members' tensors, and send the mean to each."""
        brought = {rank: message.content.tensors for rank, message in came.items()}
        brought[self._rank] = tuple(flats)
        put_mean(flats, {rank: tensors for rank, tensors in brought.items() if rank not in round_.behind})
        for message in came.values():
            message.release()
        self._announce(round_, [self._rank, *came], flats)

    def _announce(self, round_: Round, came: Sequence[int], flats: Sequence[Tensor]) -> None:
        """Send the list of members to all of them and, to those in `came`, the mean."""
        who = [self._clock.time(), *round_.members, -1, *round_.behind]
        for rank in round_.members:
            if rank != self._rank:
                mean = flats if rank in came else ()
                self._mailbox.send(
                    rank, Tag.ROUND_DOWN, round_.number, [torch.tensor(who, dtype=torch.float64), *mean]
                )

    def _follow(self, number: int, joined: Open, flats: Sequence[Tensor]) -> Round | None:
        """Send the tensors to the leader and receive the mean; None if the leader was lost with the round."""
        leader = joined.leader
        for entry in joined.entries:
            self._clock.observe(entry.time)
        # Without flats the message only wakes the leader.
        self._mailbox.send(leader, Tag.ROUND_UP, number, flats)
        waited = self._peers.stopwatch(LEADER_TIMEOUTS)
        known: Open | Closed | None = joined
        while True:
            there, too_long = self._peers.is_there(leader), waited.is_over()
            # A message that the leader sent before it was lost is still received.
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
                    raise self._peers.timed_out(waited, [leader], f"to send the mean of round {number}")

    def _take(self, message: Message, flats: Sequence[Tensor]) -> Round | None:
        """Copy the leader's mean to `flats` and return its round; None if it sent no mean."""
        announced, *means = message.content.tensors
        assert announced is not None
        time, *ranks = announced.tolist()
        self._clock.observe(time)
        cut = ranks.index(-1)
        members, behind = tuple(map(int, ranks[:cut])), tuple(map(int, ranks[cut + 1 :]))
        for flat, mean in zip(flats, means):
            if mean is not None and mean.shape == flat.shape:
                flat.copy_(mean)
        number = message.content.number
        message.release()
        return Round(number, members, behind) if means or not flats else None

    def _key(self, number: int) -> str:
        return f"{self._prefix}/round/{number}"

    def _read(self, number: int) -> bytes:
        """The record of a round that was opened; a record that was deleted counts as void."""
        return self._store.compare_set(self._key(number), "", VOID)

    def _hint(self) -> int:
        """A lower bound of the number of the open round, from which to search."""
        return int(self._store.compare_set(f"{self._prefix}/hint", "", "0"))

    def _advance_hint(self, number: int) -> None:
        """Raise the lower bound to `number`; all earlier rounds have an outcome."""
        known = self._store.compare_set(f"{self._prefix}/hint", "", str(number))
        while int(known) < number:
            known = self._store.compare_set(f"{self._prefix}/hint", known.decode(), str(number))

    def _before(self, number: int) -> Round | None:
        """The newest round before `number` that was not void."""
        for earlier in range(number - 1, max(-1, number - 1 - RECALL), -1):
            if self._store.check([self._key(earlier)]):
                outcome = read_outcome(earlier, self._store.get(self._key(earlier)))
                if isinstance(outcome, Closed):
                    return outcome.round
        return None
