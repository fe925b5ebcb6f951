"""The mean over a group, by messages: each of a few owners averages a part of the buffer and sends it to all.

With one owner there is one message to it and one back, which is best for small buffers; several owners share
the bytes. A member that ends meanwhile is left out; the part of an owner that ends keeps its local values.

There is no deadlock: a member sends its parts before it waits, and an owner waits only for those parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.core.splits import split
from plait.sync.averaging.flat_buffer import put_mean
from plait.sync.averaging.group_graph import owners_for
from plait.sync.averaging.peers import Inbox, Peers

LEAST_BYTES = 1 << 18
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
        self._up, self._down = Inbox(peers, channels.up), Inbox(peers, channels.down)

    def average(
        self,
        number: int,
        members: Sequence[int],
        flats: Sequence[Tensor],
        behind: Collection[int] = (),
    ) -> None:
        """Set `flats` to the mean over the members that are not `behind`.

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
        for owner, part in zip(owners, parts):
            if owner == rank:
                self._average_part(number, members, part, rank in behind)
        for owner, part in zip(owners, parts):
            if owner != rank:
                self._take_mean(number, owner, part)

    def _average_part(self, number: int, members: Sequence[int], part: list[Tensor], blank: bool) -> None:
        """Average the part that this worker owns, and send it to all members."""
        rank = self._mailbox.rank
        others = [member for member in members if member != rank]
        received = {
            other: self._up.receive(other, number, 1.0, "to send its part of an average") for other in others
        }
        came = {other: message for other, message in received.items() if message is not None}
        brought = {other: message.content.tensors for other, message in came.items()}
        counts = put_mean(part, brought if blank else {**brought, rank: part})
        for message in came.values():
            message.release()
        for other in others:
            self._mailbox.send(other, self._channels.down, number, part if counts[0] else [])

    def _take_mean(self, number: int, owner: int, part: list[Tensor]) -> None:
        message = self._down.receive(owner, number, OWNER_TIMEOUTS, "to send its part of a mean")
        if message is None:
            return
        for local, mean in zip(part, message.content.tensors):
            if mean is not None and mean.shape == local.shape:
                local.copy_(mean)
        message.release()
