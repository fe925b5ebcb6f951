"""Sums and results from another host: receives are posted in advance, into the final memory if possible."""

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
from plait.sync.allreduce.reducers import Members

# The number of tags per lane; the channels of pipelines use other tags of the same process group.
_TAGS_OF_A_LANE = 1 << 14
# The number of receives posted in advance: their notices queue behind the data in the other direction, which
# takes long on a slow link. Fewer chunks are received into lent memory, to save memory.
_AHEAD = 256
_LENT = 24


def tag_of(members: Members, route: int, phase: int) -> int:
    """The tag of a stream, unique between two workers."""
    return Tag.FIRST_ROUTE + members.lane * _TAGS_OF_A_LANE + 2 * route + phase


class RemoteStream(threading.Thread):
    """One phase of a route from a worker of another host.

    Gloo has no way to poll for arrivals, so this thread waits and calls `arrived` with each chunk. The stream
    lends memory for a chunk, unless the caller gives the memory to receive into.
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
        self._expected: queue.SimpleQueue[tuple[Tensor | None, int] | None] = queue.SimpleQueue()
        self._lent: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(_LENT):
            self._lent.put(torch.empty(0, dtype=torch.uint8))

    def expect(self, size: int, into: Tensor | None) -> None:
        """Expect the next chunk, of `size` bytes, in `into`, or at the start of lent memory."""
        self._expected.put((into, size))

    def return_memory(self, memory: Tensor) -> None:
        """Return lent memory that was passed to `arrived`."""
        self._lent.put(memory)

    def end(self) -> None:
        """Let the thread end once all expected chunks have arrived."""
        self._expected.put(None)

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
                    expected = self._expected.get(block=not posted)
                except queue.Empty:
                    break
                if expected is None:
                    return
                posted.append(self._post(*expected, posted))
            self._take_first(posted)

    def _take_first(self, posted: deque[tuple[Tensor, dist.Work]]) -> None:
        memory, work = posted.popleft()
        work.wait(timedelta(seconds=self._members.deadline_s))
        self._arrived(memory)

    def _post(
        self, into: Tensor | None, size: int, posted: deque[tuple[Tensor, dist.Work]]
    ) -> tuple[Tensor, dist.Work]:
        if into is None:
            # All memory is lent: first pass on arrived chunks, so that their memory is returned.
            while self._lent.empty() and posted:
                self._take_first(posted)
            into = self._lent.get()
            if into.numel() < size:
                into = torch.empty(size, dtype=torch.uint8)
        work = dist.irecv(into[:size], self._peer, group=self._members.group, tag=self._tag)
        assert work is not None
        return into, work
