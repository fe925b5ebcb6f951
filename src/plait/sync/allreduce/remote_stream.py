"""Sums and results that come from another host: receives posted ahead, straight into their place."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.tags import Tag
from plait.core.errors import LostPeer, PeerError
from plait.sync.allreduce.sums import Members

# Apart from the channels of pipelines, which use the same process group.
_TAGS_OF_A_LANE = 1 << 14
# Receives posted ahead: their notices travel behind the data that goes the other way, which takes long on a
# slow link. Pieces that come into lent memory are fewer, for that memory's sake.
_AHEAD = 256
_LENT = 24


def tag_of(members: Members, route: int, phase: int) -> int:
    """The tag that distinguishes a stream from the others between the same two workers."""
    return Tag.FIRST_ROUTE + members.lane * _TAGS_OF_A_LANE + 2 * route + phase


class RemoteStream(threading.Thread):
    """One phase of a route from a worker of another host.

    Its transport offers no way to ask whether something has come, so this thread waits, and `arrived` is
    called with what has. The stream lends memory for each piece, unless the piece brings its own.
    """

    def __init__(
        self,
        members: Members,
        peer: int,
        tag: int,
        arrived: Callable[[Tensor], None],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(name=f"plait-from-{members.ranks[peer]}", daemon=True)
        self._members = members
        self._peer = members.ranks[peer]
        self._tag = tag
        self._arrived = arrived
        self._failed = failed
        self._wanted: queue.SimpleQueue[tuple[Tensor | None, int] | None] = queue.SimpleQueue()
        self._lent: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(_LENT):
            self._lent.put(torch.empty(0, dtype=torch.uint8))

    def want(self, size: int, into: Tensor | None) -> None:
        """Expect a piece of `size` bytes after those before: in `into`, or at the start of lent memory."""
        self._wanted.put((into, size))

    def give_back(self, memory: Tensor) -> None:
        """Return lent memory that `arrived` brought."""
        self._lent.put(memory)

    def end(self) -> None:
        """Let the thread end once all that was wanted has come."""
        self._wanted.put(None)

    def run(self) -> None:
        try:
            self._receive()
        except RuntimeError as failure:
            self._failed(
                PeerError(
                    f"worker {self._members.rank} waited {self._members.deadline_s:g} s at most for "
                    f"gradients of worker {self._peer}: {failure}",
                    LostPeer.SILENT,
                    self._peer,
                )
            )

    def _receive(self) -> None:
        posted: deque[tuple[Tensor, dist.Work]] = deque()
        while True:
            while len(posted) < _AHEAD:
                try:
                    wanted = self._wanted.get(block=not posted)
                except queue.Empty:
                    break
                if wanted is None:
                    return
                posted.append(self._post(*wanted, posted))
            self._take_first(posted)

    def _take_first(self, posted: deque[tuple[Tensor, dist.Work]]) -> None:
        memory, work = posted.popleft()
        work.wait(timedelta(seconds=self._members.deadline_s))
        self._arrived(memory)

    def _post(
        self, into: Tensor | None, size: int, posted: deque[tuple[Tensor, dist.Work]]
    ) -> tuple[Tensor, dist.Work]:
        if into is None:
            # All memory lent out: what has arrived must be passed on first, or nobody would give any back.
            while self._lent.empty() and posted:
                self._take_first(posted)
            into = self._lent.get()
            if into.numel() < size:
                into = torch.empty(size, dtype=torch.uint8)
        work = dist.irecv(into[:size], self._peer, group=self._members.group, tag=self._tag)
        assert work is not None
        return into, work
