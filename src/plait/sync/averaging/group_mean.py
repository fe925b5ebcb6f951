"""The mean over a group, by messages: each of a few owners averages a part of the buffer and sends it to all.

With one owner there is one message to it and one back, which is best for small buffers; several owners share
the bytes. A member that ends meanwhile is left out; the part of an owner that ends keeps its local values.

There is no deadlock: a member sends its parts before it waits, and an owner waits only for those parts.
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
# An owner may itself wait for a member, and fails after one timeout, so members wait for two.
OWNER_TIMEOUTS = 2.0


@dataclass(frozen=True)
class ChannelPair:
    """The two channels of one kind of averaging: to the owners and back."""

    up: int
    down: int


class GroupMean:
    """Averages flat buffers over groups. All members of a group call `average` with the same arguments."""

    def __init__(self, peers: Peers, channels: ChannelPair) -> None:
        self._peers = peers
        self._mailbox = peers.mailbox
        self._channels = channels
        self._up, self._down = Inbox(peers.mailbox, channels.up), Inbox(peers.mailbox, channels.down)

    def average(
        self,
        number: int,
        members: Sequence[int],
        flats: Sequence[Tensor],
        behind: Collection[int] = (),
    ) -> bool:
        """Set `flats` to the mean over the members that are not `behind`; False if an owner sent none.

        `number` increases from call to call. The first of `flats` has the same size on all members; another
        one that is missing or differs in size on some members is averaged over the rest.
        """
        self._up.drop_before(number)
        self._down.drop_before(number)
        rank = self._mailbox.rank
        members = sorted(members)
        count = owners_for(flats[0].numel() * flats[0].element_size(), len(members), LEAST_BYTES)
        # The owners rotate from round to round.
        first = number % len(members)
        owners = [members[(first + i) % len(members)] for i in range(count)]
        cuts = [split(f.numel(), count) for f in flats]
        parts = [[f[c[i].start : c[i].stop] for f, c in zip(flats, cuts)] for i in range(count)]
        for owner, part in zip(owners, parts):
            if owner != rank:
                self._mailbox.send(owner, self._channels.up, number, [] if rank in behind else part)
        taken = [
            self._average_part(number, members, part, rank in behind)
            for owner, part in zip(owners, parts)
            if owner == rank
        ]
        others = [(owner, part) for owner, part in zip(owners, parts) if owner != rank]
        taken += [self._take_mean(number, owner, part) for owner, part in others]
        self._peers.flush()
        return all(taken)

    def _average_part(self, number: int, members: Sequence[int], part: list[Tensor], blank: bool) -> bool:
        """Average the part that this worker owns, and send it to all members.

        False if no member contributed, so there is no mean.
        """
        rank = self._mailbox.rank
        others = [member for member in members if member != rank]
        received = {
            other: self._receive(self._up, other, number, 1.0, "to send its part of an average")
            for other in others
        }
        came = {other: message for other, message in received.items() if message is not None}
        brought = {other: message.content.tensors for other, message in came.items()}
        counts = put_mean(part, brought if blank else {**brought, rank: part})
        for message in came.values():
            message.release()
        for other in others:
            self._mailbox.send(other, self._channels.down, number, part if counts[0] else [])
        return counts[0] > 0

    def _take_mean(self, number: int, owner: int, part: list[Tensor]) -> bool:
        message = self._receive(self._down, owner, number, OWNER_TIMEOUTS, "to send its part of a mean")
        if message is None:
            return False
        for local, mean in zip(part, message.content.tensors):
            if mean is not None and mean.shape == local.shape:
                local.copy_(mean)
        has_mean = bool(message.content.tensors)
        message.release()
        return has_mean

    def _receive(self, inbox: Inbox, peer: int, number: int, timeouts: float, what: str) -> Message | None:
        """Wait for message `number` of `peer`; None if it is not live, or has sent later messages instead."""
        waited = self._peers.stopwatch(timeouts)
        while True:
            is_there = self._peers.is_there(peer)
            if not is_there:
                # Messages that it sent before can still be received.
                self._mailbox.wait(0.0)
            message = inbox.find(peer, number)
            if message is not None or not is_there or inbox.is_past(peer, number):
                return message
            if waited.is_over():
                raise self._peers.timed_out(waited, [peer], what)
            self._mailbox.wait(LOOK_S)
