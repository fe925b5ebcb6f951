"""Workers that run the same code in lockstep, over channels: the first one decides for all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from plait.comm.channels import Channels
from plait.comm.tags import Tag


class Lockstep:
    """This worker, of rank `rank`, among those in lockstep; all make the same calls in the same order."""

    def __init__(self, channels: Channels, rank: int, workers: Sequence[int]) -> None:
        self._channels = channels
        self._rank = rank
        self.first, *self.others = workers
        self._shared = self._sent = 0
        self._received = Counter[int]()

    @property
    def is_first(self) -> bool:
        return self._rank == self.first

    def from_first(self, find: Callable[[], Any]) -> Any:
        """Broadcast the result of `find` on the first worker; plain values only.

        Raises PeerError if the first worker is gone.
        """
        self._shared += 1
        if self.is_first:
            note = json.dumps(find())
            for other in self.others:
                self._channels.send(other, Tag.DECISION, self._shared, [], "what is done next", note)
            return json.loads(note)
        what = "what the pipeline's first worker does next"
        message = self._channels.receive(self.first, Tag.DECISION, self._shared, what)
        value = json.loads(message.content.note)
        message.release()
        return value

    def send_to_first(self, tensors: Sequence[Tensor]) -> None:
        """Send something to the first worker, which waits for it."""
        self._sent += 1
        self._channels.send(self.first, Tag.TO_FIRST, self._sent, tensors, "what the first waits for")

    def receive_from(self, other: int, what: str) -> list[Tensor]:
        """On the first worker: receive from another one; `what` describes it in errors."""
        self._received[other] += 1
        message = self._channels.receive(other, Tag.TO_FIRST, self._received[other], what)
        tensors = [tensor.clone() for tensor in message.content.tensors if tensor is not None]
        message.release()
        return tensors
