"""Messages over gloo between two workers: flat buffers, with the next receive posted in advance.

Both ends agree on a size, and every message has it. A larger message is preceded by one of the old size that
announces the new size. Smaller messages are padded.

gloo does not report that a send is complete unless it is waited for. So every message also acknowledges how
many messages its sender has received on one channel of the other direction, round-robin; their buffers are
free again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.links.packing import NONE_RECEIVED, Buffer, Message, Received, packing_of
from plait.comm.tags import Tag

_FIRST_CAPACITY = 1 << 12
# The maximum number of channels in the list of posted receives that both ends exchange at close.
_MOST_CHANNELS = 1024


@dataclass
class _Outgoing:
    """What was sent on one channel: messages in flight, and how many are complete."""

    capacity: int = _FIRST_CAPACITY
    under_way: deque[tuple[dist.Work, Buffer]] = field(default_factory=deque)
    free: list[Buffer] = field(default_factory=list)
    left: int = 0

    def wait_for_first(self, seconds: float) -> None:
        """Wait for the oldest message, and reclaim its buffer."""
        work, buffer = self.under_way[0]
        work.wait(timedelta(seconds=seconds))
        self.under_way.popleft()
        self.free.append(buffer)
        self.left += 1


@dataclass
class _Incoming:
    capacity: int = _FIRST_CAPACITY
    posted: tuple[dist.Work, Buffer] | None = None
    free: list[Buffer] = field(default_factory=list)
    received: int = 0


class RemoteLink:
    """One end of the connection to a worker of another host, over the default process group."""

    def __init__(self, peer: int, window: int) -> None:
        self._peer = peer
        self._window = window
        self._outgoing: dict[int, _Outgoing] = defaultdict(_Outgoing)
        self._incoming: dict[int, _Incoming] = defaultdict(_Incoming)
        # Channels with received messages that are not yet acknowledged, oldest first.
        self._unacknowledged: dict[int, None] = {}

    @property
    def buffer_count(self) -> int:
        """The number of send buffers, used or free."""
        return sum(len(out.under_way) + len(out.free) for out in self._outgoing.values())

    def send(
        self, channel: int, number: int, tensors: Sequence[Tensor | None], note: str, seconds: float
    ) -> None:
        """Send a message; blocks only if the window of messages in flight is full."""
        out = self._outgoing[channel]
        packing = packing_of(tensors, note)
        if packing.size > out.capacity:
            request = Buffer(torch.empty(out.capacity, dtype=torch.uint8))
            request.write_need(packing.size)
            self._start(channel, out, request)
            out.capacity = packing.size
        while len(out.under_way) >= self._window:
            out.wait_for_first(seconds)
        fitting = [b for b in out.free if b.capacity == out.capacity]
        out.free = fitting[1:]
        buffer = fitting[0] if fitting else Buffer(torch.empty(out.capacity, dtype=torch.uint8))
        buffer.write(number, packing, tensors, self._received())
        self._start(channel, out, buffer)

    def _received(self) -> Received:
        """The next acknowledgement to the peer: channel and number of received messages."""
        channel = next(iter(self._unacknowledged), None)
        if channel is None:
            return NONE_RECEIVED
        del self._unacknowledged[channel]
        return channel, self._incoming[channel].received

    def _take_back(self, received: Received, seconds: float) -> None:
        """Reclaim the buffers of messages that the peer has acknowledged."""
        channel, count = received
        if channel >= 0:
            out = self._outgoing[channel]
            while out.left < count:
                out.wait_for_first(seconds)

    def _start(self, channel: int, out: _Outgoing, buffer: Buffer) -> None:
        work = dist.isend(buffer.flat, self._peer, tag=channel)
        assert work is not None
        out.under_way.append((work, buffer))

    def expect(self, channel: int) -> None:
        """Post the receive for the next message of `channel`."""
        into = self._incoming[channel]
        if into.posted is None:
            fitting = [b for b in into.free if b.capacity == into.capacity]
            into.free = fitting[1:]
            buffer = fitting[0] if fitting else Buffer(torch.empty(into.capacity, dtype=torch.uint8))
            work = dist.irecv(buffer.flat, self._peer, tag=channel)
            assert work is not None
            into.posted = (work, buffer)

    def receive(self, channel: int, seconds: float) -> Message:
        """Wait at most `seconds` for the next message of `channel`, then post the next receive."""
        into = self._incoming[channel]
        while True:
            self.expect(channel)
            assert into.posted is not None
            work, buffer = into.posted
            work.wait(timedelta(seconds=seconds))
            into.posted = None
            into.received += 1
            self._take_back(buffer.received(), seconds)
            need = buffer.need()
            if need is None:
                break
            into.capacity = need
        self._unacknowledged[channel] = None
        self.expect(channel)
        return Message(buffer.read(), lambda: into.free.append(buffer))

    def close(self, seconds: float) -> None:
        """Complete the receives that the peer has posted in advance, and wait for all operations."""
        for channel in self._exchange_posted(seconds):
            out = self._outgoing[channel]
            end = Buffer(torch.empty(out.capacity, dtype=torch.uint8))
            end.write_need(0)
            self._start(channel, out, end)
        for out in self._outgoing.values():
            for work, _ in out.under_way:
                work.wait(timedelta(seconds=seconds))
        for into in self._incoming.values():
            if into.posted is not None:
                into.posted[0].wait(timedelta(seconds=seconds))

    def _exchange_posted(self, seconds: float) -> list[int]:
        """Exchange the channels with posted receives; returns the peer's."""
        posted = [channel for channel, into in self._incoming.items() if into.posted is not None]
        mine, theirs = torch.full((2, _MOST_CHANNELS), -1)
        mine[: len(posted)] = torch.tensor(posted, dtype=torch.int64)
        sent = dist.isend(mine, self._peer, tag=Tag.CLOSING)
        received = dist.irecv(theirs, self._peer, tag=Tag.CLOSING)
        for work in (sent, received):
            assert work is not None
            work.wait(timedelta(seconds=seconds))
        return [channel for channel in theirs.tolist() if channel >= 0]
