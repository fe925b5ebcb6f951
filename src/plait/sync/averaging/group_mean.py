"""The mean over a group, by messages: each of a few owners averages a part of the memory and sends it to all.

One owner means one message to it and one back, which is best where messages are small; more owners share the
bytes. A member that ends on the way is left out; the part of an owner that ends stays as each member has it.

Nobody waits in a circle: a member sends its parts before it waits, an owner waits for those alone, and who
has gone on has sent all that the others need of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.comm.links.packing import Message
from plait.core.splits import split
from plait.sync.averaging.flat_buffer import put_mean
from plait.sync.averaging.group_graph import owners_for
from plait.sync.averaging.peers import Inbox, Peers

LEAST_BYTES = 1 << 18
LOOK_S = 0.05
# An owner may itself wait for a member, and names it after one timeout; so it is waited for two.
OWNER_TIMEOUTS = 2.0


@dataclass(frozen=True)
class Ways:
    """The two channels that one kind of averaging uses: towards owners and back."""

    up: int
    down: int


class GroupMean:
    """Averages flat memory over groups. All members of a group call `average` with the same arguments."""

    def __init__(self, peers: Peers, ways: Ways) -> None:
        self._peers = peers
        self._mailbox = peers.mailbox
        self._ways = ways
        self._up, self._down = Inbox(peers.mailbox, ways.up), Inbox(peers.mailbox, ways.down)

    def average(
        self,
        number: int,
        members: Sequence[int],
        flats: Sequence[Tensor],
        behind: Collection[int] = (),
    ) -> bool:
        """`flats` hold the mean of the members' that are not `behind`; False where an owner gave none.

        `number` rises from call to call on these ways. The first of `flats` has the same size on all members;
        a further one that some lack or have otherwise is averaged over the rest.
        """
        self._up.drop_before(number)
        self._down.drop_before(number)
        rank = self._mailbox.rank
        members = sorted(members)
        count = owners_for(flats[0].numel() * flats[0].element_size(), len(members), LEAST_BYTES)
        # The work moves on from round to round, so that no member is always the one that averages.
        first = number % len(members)
        owners = [members[(first + i) % len(members)] for i in range(count)]
        cuts = [split(f.numel(), count) for f in flats]
        pieces = [[f[c[i].start : c[i].stop] for f, c in zip(flats, cuts)] for i in range(count)]
        for owner, piece in zip(owners, pieces):
            if owner != rank:
                self._mailbox.send(owner, self._ways.up, number, [] if rank in behind else piece)
        taken = [
            self._average_own(number, members, piece, rank in behind)
            for owner, piece in zip(owners, pieces)
            if owner == rank
        ]
        others = [(owner, piece) for owner, piece in zip(owners, pieces) if owner != rank]
        taken += [self._take_mean(number, owner, piece) for owner, piece in others]
        self._peers.flush()
        return all(taken)

    def _average_own(self, number: int, members: Sequence[int], piece: list[Tensor], blank: bool) -> bool:
        """Average the part that this worker owns, and send it to all members.

        False where nobody gave anything, so that there is no mean.
        """
        rank = self._mailbox.rank
        others = [member for member in members if member != rank]
        found = {
            other: self._receive(self._up, other, number, 1.0, "to hand in its part of an average")
            for other in others
        }
        came = {other: message for other, message in found.items() if message is not None}
        brought = {other: message.content.tensors for other, message in came.items()}
        counts = put_mean(piece, brought if blank else {**brought, rank: piece})
        for message in came.values():
            message.release()
        for other in others:
            self._mailbox.send(other, self._ways.down, number, piece if counts[0] else [])
        return counts[0] > 0

    def _take_mean(self, number: int, owner: int, piece: list[Tensor]) -> bool:
        message = self._receive(self._down, owner, number, OWNER_TIMEOUTS, "to hand out its part of a mean")
        if message is None:
            return False
        for own, mean in zip(piece, message.content.tensors):
            if mean is not None and mean.shape == own.shape:
                own.copy_(mean)
        gave_one = bool(message.content.tensors)
        message.release()
        return gave_one

    def _receive(self, inbox: Inbox, peer: int, number: int, timeouts: float, what: str) -> Message | None:
        """Message `number` of `peer`; None where it is gone, absent, or has gone on without this worker."""
        waited = self._peers.stopwatch(timeouts)
        while True:
            there = self._peers.is_there(peer)
            if not there:
                # What it sent before it went away can still be taken.
                self._mailbox.wait(0.0)
            message = inbox.find(peer, number)
            if message is not None or not there or inbox.is_past(peer, number):
                return message
            if waited.is_over():
                raise self._peers.timed_out(waited, [peer], what)
            self._mailbox.wait(LOOK_S)
