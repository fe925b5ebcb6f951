"""The mean over a group by mail: each of a few owners averages a span of the memory and hands it to all.

One owner means one message to it and one back, which is best where messages are small; more owners share
the bytes. A member that ends on the way is left out; the span of an owner that ends stays as each has it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.cluster.mail import Mail
from plait.cluster.messages import Message
from plait.cluster.presence import Presence
from plait.sync.connectivity import owners_for, spans

LEAST_BYTES = 1 << 18
LOOK_S = 0.05


@dataclass(frozen=True)
class Ways:
    """The two channels that one kind of averaging uses: towards owners and back."""

    up: int
    down: int


class GroupMean:
    """Averages flat memory over groups. All members of a group call `average` with the same arguments."""

    def __init__(self, mail: Mail, presence: Presence, ways: Ways) -> None:
        self._mail = mail
        self._presence = presence
        self._ways = ways
        self._early: dict[tuple[int, int], Message] = {}

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
        rank = self._mail.rank
        members = sorted(members)
        count = owners_for(flats[0].numel() * flats[0].element_size(), len(members), LEAST_BYTES)
        # The work moves on from round to round, so that no member is always the one that averages.
        first = number % len(members)
        owners = [members[(first + i) % len(members)] for i in range(count)]
        cuts = [spans(f.numel(), count) for f in flats]
        pieces = [[f[c[i][0] : c[i][1]] for f, c in zip(flats, cuts)] for i in range(count)]
        for owner, piece in zip(owners, pieces):
            if owner != rank:
                self._mail.send(owner, self._ways.up, number, [] if rank in behind else piece)
        for owner, piece in zip(owners, pieces):
            if owner == rank:
                self._average_own(number, members, piece, rank in behind)
        others = [(owner, piece) for owner, piece in zip(owners, pieces) if owner != rank]
        taken = [self._take_mean(number, owner, piece) for owner, piece in others]
        self._mail.flush(1.0)
        return all(taken)

    def _average_own(self, number: int, members: Sequence[int], piece: list[Tensor], blank: bool) -> None:
        """Average the span that this worker owns, in the order of ranks, and hand it to all members."""
        rank = self._mail.rank
        others = [member for member in members if member != rank]
        counts = [0 if blank else 1 for _ in piece]
        for other in others:
            message = self._receive(other, self._ways.up, number)
            if message is None:
                continue
            for i, (own, theirs) in enumerate(zip(piece, message.content.tensors)):
                if theirs is not None and theirs.shape == own.shape:
                    own.copy_(theirs) if counts[i] == 0 else own.add_(theirs)
                    counts[i] += 1
            message.release()
        for own, count in zip(piece, counts):
            if count > 1:
                own.div_(count)
        for other in others:
            self._mail.send(other, self._ways.down, number, piece)

    def _take_mean(self, number: int, owner: int, piece: list[Tensor]) -> bool:
        message = self._receive(owner, self._ways.down, number)
        if message is None:
            return False
        _take(message, piece)
        return True

    def _receive(self, peer: int, channel: int, number: int) -> Message | None:
        """Message `number` of `peer`; None where it is gone, absent, or has gone on without this worker."""
        while True:
            message = self._early.pop((peer, channel), None) or self._mail.take(peer, channel)
            if message is not None and message.content.number == number:
                return message
            if message is not None and message.content.number > number:
                self._early[peer, channel] = message
                return None
            if message is not None:
                message.release()
            elif self._mail.is_gone(peer) or peer not in self._presence.living():
                return None
            else:
                self._mail.wait(LOOK_S)


def _take(message: Message, piece: Sequence[Tensor]) -> None:
    """Put the means that a message brought into `piece`."""
    for own, mean in zip(piece, message.content.tensors):
        if mean is not None and mean.shape == own.shape:
            own.copy_(mean)
    message.release()
