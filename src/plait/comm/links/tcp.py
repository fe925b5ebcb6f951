"""Messages between two workers of different hosts over TCP, with the same interface as shared memory.

Two threads send and receive, so messages move while both workers compute. What has arrived takes effect in
`take_notices`, in the thread that uses the link. The peer acknowledges each message that it has released, so
a sender knows how many are in flight.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections import Counter, defaultdict, deque

import torch
from torch import Tensor

from plait.comm.links.packing import Buffer, Content, Message, OnSent, packing_of

# The type of the frame, the channel, the size of the body.
_HEAD = struct.Struct("<BIQ")
FULL, FREE, END, HEADER = 1, 2, 3, 4
# The head of a frame to send, its body, and what is called once it is sent.
_Frame = tuple[bytes, Tensor | None, OnSent | None]
_MOST_SPARE = 8
# How long `close` waits until everything is sent.
CLOSE_S = 10.0


class TcpLink:
    """One end of the connection to a worker of another host.

    `ended` is set if the peer has closed its end deliberately, `lost` if it is gone otherwise.
    """

    # The sending thread needs no help.
    has_unsent = False

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._socket = connection
        self._outgoing: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        # Received frames: type, channel and body; None at the end of the connection.
        self._incoming: queue.SimpleQueue[tuple[int, int, Tensor | None] | None] = queue.SimpleQueue()
        self._notices, self._notifier = socket.socketpair()
        for end in (self._notices, self._notifier):
            end.setblocking(False)
        self._arrived: dict[int, deque[Buffer]] = defaultdict(deque)
        # By channel: the number of messages that the peer has not released.
        self.under_way = Counter[int]()
        # Memory of messages that were sent or released: new pages take as long as copying.
        self._spare: deque[Tensor] = deque(maxlen=_MOST_SPARE)
        self.ended = False
        self.lost = False
        self._all_sent = threading.Event()
        self._receiver = threading.Thread(target=self._receive_all, name="plait-receive", daemon=True)
        self._receiver.start()
        threading.Thread(target=self._send_all, name="plait-send", daemon=True).start()

    def fileno(self) -> int:
        """A descriptor that is readable if `take_notices` has something to do."""
        return self._notices.fileno()

    def send(self, channel: int, content: Content, on_sent: OnSent | None = None) -> int:
        """Copy a message and start sending it; never blocks. Returns its bytes."""
        packing = packing_of(content)
        buffer = Buffer(self._memory(packing.size))
        buffer.write(content, packing)
        self.under_way[channel] += 1
        self._put(FULL, channel, buffer.flat, on_sent)
        return packing.size

    def take(self, channel: int) -> Message | None:
        """The next message of `channel`, if one has arrived."""
        if not self._arrived[channel]:
            return None
        buffer = self._arrived[channel].popleft()

        def release() -> None:
            self._spare.append(buffer.flat)
            self._put(FREE, channel)

        return Message(buffer.read(), release)

    def take_notices(self) -> None:
        """Handle what the peer has sent, without blocking."""
        with contextlib.suppress(BlockingIOError):
            while self._notices.recv(4096):
                pass
        while not self._incoming.empty():
            frame = self._incoming.get()
            if frame is None:
                self.lost = not self.ended
            else:
                self._handle(*frame)

    def close(self, seconds: float = CLOSE_S) -> None:
        """Close this end, after what was sent before; the peer is notified that it was deliberate.

        What is not sent within `seconds` is dropped.
        """
        self._put(END, 0)
        self._outgoing.put(None)
        if not self._all_sent.wait(seconds):
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _handle(self, kind: int, channel: int, body: Tensor | None) -> None:
        if kind == FULL:
            assert body is not None
            self._arrived[channel].append(Buffer(body))
        elif kind == FREE:
            self.under_way[channel] -= 1
        elif kind == END:
            self.ended = True

    def _put(
        self, kind: int, channel: int, body: Tensor | None = None, on_sent: OnSent | None = None
    ) -> None:
        size = 0 if body is None else body.numel()
        self._outgoing.put((_HEAD.pack(kind, channel, size), body, on_sent))

    def _send_all(self) -> None:
        """Send until the link is closed, then wait until the peer has closed its end, too."""
        # What the peer sent before it ended can still be received; after that the receiver finds the end.
        with contextlib.suppress(OSError):
            while (frame := self._outgoing.get()) is not None:
                head, body, on_sent = frame
                self._socket.sendall(head)
                if body is not None:
                    self._socket.sendall(memoryview(body.numpy().data))
                    self._spare.append(body)
                if on_sent is not None:
                    on_sent()
            self._socket.shutdown(socket.SHUT_WR)
        self._all_sent.set()
        self._receiver.join()
        self._socket.close()

    def _receive_all(self) -> None:
        head = bytearray(_HEAD.size)
        with contextlib.suppress(OSError):
            while True:
                self._receive(memoryview(head))
                kind, channel, size = _HEAD.unpack(head)
                body = None
                if size:
                    body = self._memory(size)
                    self._receive(memoryview(body.numpy().data))
                self._notify((kind, channel, body))
        self._notify(None)

    def _memory(self, size: int) -> Tensor:
        """Memory of an earlier message of that size, if there is any, else new memory; for any thread."""
        with contextlib.suppress(IndexError):
            for _ in range(len(self._spare)):
                memory = self._spare.popleft()
                if memory.numel() == size:
                    return memory
                self._spare.append(memory)
        return torch.empty(size, dtype=torch.uint8)

    def _receive(self, into: memoryview) -> None:
        """Fill `into` with the next bytes; OSError at the end of the connection."""
        while len(into):
            count = self._socket.recv_into(into, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError
            into = into[count:]

    def _notify(self, frame: tuple[int, int, Tensor | None] | None) -> None:
        self._incoming.put(frame)
        # A full socket already holds unread notices; a closed one has no reader.
        with contextlib.suppress(OSError):
            self._notifier.send(b"!")
