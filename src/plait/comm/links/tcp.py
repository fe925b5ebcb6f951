"""A TCP connection between two workers of different hosts, with the same interface as shared memory.

Sending never blocks: data that the socket does not accept is sent when this end next polls. The peer
acknowledges each message that it has released, so a sender knows how many are in flight.
"""

from __future__ import annotations

import socket
import struct
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm.links.packing import Buffer, Message, packing_of

# The type of the frame, the channel, the size of the body.
_HEAD = struct.Struct("<BIQ")
_FULL, _FREE, _END = 1, 2, 3


class WireLink:
    """One end of the connection to a worker of another host."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._socket = connection
        self._unsent: deque[memoryview] = deque()
        self._arrived: dict[int, deque[Buffer]] = defaultdict(deque)
        self._under_way: dict[int, int] = defaultdict(int)
        self._head = bytearray(_HEAD.size)
        self._body: Tensor | None = None
        self._into = memoryview(self._head)
        self.ended = False
        self.lost = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether there is unsent data."""
        return bool(self._unsent)

    def under_way(self, channel: int) -> int:
        """The number of messages on `channel` that the peer has not released."""
        return self._under_way[channel]

    def send(self, channel: int, number: int, tensors: Sequence[Tensor | None], note: str) -> None:
        """Copy a message and start sending it; never blocks."""
        packing = packing_of(tensors, note)
        buffer = Buffer(torch.empty(packing.size, dtype=torch.uint8))
        buffer.write(number, packing, tensors)
        self._under_way[channel] += 1
        self._put(_FULL, channel, memoryview(buffer.flat.numpy().data))

    def take(self, channel: int) -> Message | None:
        """The next message of `channel`, if one has arrived."""
        if not self._arrived[channel]:
            return None
        buffer = self._arrived[channel].popleft()
        return Message(buffer.read(), lambda: self._put(_FREE, channel))

    def take_notices(self) -> None:
        """Send and receive as much as possible without blocking."""
        self._push()
        try:
            while not self.lost and not self.ended:
                got = self._socket.recv_into(self._into)
                if got == 0:
                    self.lost = True
                self._into = self._into[got:]
                if not len(self._into):
                    self._take_piece()
        except BlockingIOError:
            return
        except OSError:
            self.lost = True

    def close(self) -> None:
        """Close this end; the peer is notified that it was deliberate."""
        self._put(_END, 0)
        self._socket.close()

    def _put(self, kind: int, channel: int, body: memoryview | None = None) -> None:
        self._unsent.append(memoryview(_HEAD.pack(kind, channel, len(body) if body is not None else 0)))
        if body is not None:
            self._unsent.append(body)
        self._push()

    def _push(self) -> None:
        try:
            while self._unsent and not self.lost:
                sent = self._socket.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not len(self._unsent[0]):
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            # What the peer sent before it ended can still be read; the read after that finds the end.
            self._unsent.clear()

    def _take_piece(self) -> None:
        """Process a complete header or body, and prepare the buffer for the next bytes."""
        kind, channel, size = _HEAD.unpack(self._head)
        if self._body is None and size:
            self._body = torch.empty(size, dtype=torch.uint8)
            self._into = memoryview(self._body.numpy().data)
            return
        if kind == _FULL:
            assert self._body is not None
            self._arrived[channel].append(Buffer(self._body))
        elif kind == _FREE:
            self._under_way[channel] -= 1
        else:
            self.ended = True
        self._body = None
        self._into = memoryview(self._head)
