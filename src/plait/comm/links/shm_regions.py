"""Regions: memory of a worker that the others of its host read in place, and words about what is in it.

Nothing is copied on the way: a word says that something is ready, and the reader looks at it where it lies.
Whoever tells keeps the memory as it is until it hears that it has been read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_WORD = struct.Struct("<Bqq")
_TOLD, _SHOWN, _END = 1, 2, 3
# Room beside a word for one descriptor.
_EXTRA = socket.CMSG_LEN(struct.calcsize("i"))


class SharedBuffer:
    """Memory of this worker that it can show to others; it ends with the last process that sees it.

    On systems without anonymous shared memory it is memory like any other, and can be shown to nobody.
    """

    def __init__(self, size: int) -> None:
        # The kernel maps no empty file.
        self.size = max(size, 1)
        self.descriptor: int | None = None
        if not hasattr(os, "memfd_create"):
            self.flat = torch.zeros(self.size, dtype=torch.uint8)
            return
        self.descriptor = os.memfd_create("plait")
        os.ftruncate(self.descriptor, self.size)
        self.flat = _map(self.descriptor, self.size)

    def close(self) -> None:
        """Show it to nobody any more; those who have seen it keep it, and so does `flat`."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def _map(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class LocalPeer:
    """Another worker of this host: its region, and the socket between the two. Nothing here waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unsent: deque[bytes] = deque()
        self.region: Tensor | None = None
        self.ended = False
        self.lost = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def full(self) -> bool:
        """Whether words wait until the peer has read earlier ones."""
        return bool(self._unsent)

    def show(self, region: SharedBuffer) -> None:
        """Let the peer see `region`; the first thing it is told."""
        assert region.descriptor is not None
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [_WORD.pack(_SHOWN, 0, region.size)], [region.descriptor])

    def see(self, seconds: float) -> None:
        """Wait for the peer's region, the first thing it tells; raises OSError where it tells none."""
        self._socket.settimeout(max(0.001, seconds))
        data, extra, _, _ = self._socket.recvmsg(_WORD.size, _EXTRA)
        self._socket.settimeout(None)
        if not data:
            raise ConnectionError("the connection has ended")
        _, _, size = _WORD.unpack(data)
        (descriptor,) = (struct.unpack("i", content)[0] for _, _, content in extra)
        self.region = _map(descriptor, size)
        os.close(descriptor)

    def tell(self, topic: int, number: int) -> None:
        """Send a word: two numbers whose meaning both know."""
        self._unsent.append(_WORD.pack(_TOLD, topic, number))
        self.send_rest()

    def send_rest(self) -> None:
        """Send what could not be sent before, as far as there is room."""
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                # Whoever waits for this peer reads the end of the connection and says so.
                self._unsent.clear()
                return
            self._unsent.popleft()

    def hear(self) -> Iterator[tuple[int, int]]:
        """The words that have come."""
        while not self.lost and not self.ended:
            try:
                data = self._socket.recv(_WORD.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer closed without reading all of ours; what it sent before can still be read.
                continue
            except OSError:
                data = b""
            if not data:
                self.lost = True
                return
            kind, topic, number = _WORD.unpack(data)
            if kind == _TOLD:
                yield topic, number
            else:
                self.ended = True

    def close(self, on_purpose: bool = True) -> None:
        """End the connection; the peer is told where that is on purpose, and else waits for what it needs."""
        if not on_purpose:
            return
        with contextlib.suppress(OSError):
            self._socket.send(_WORD.pack(_END, 0, 0), socket.MSG_DONTWAIT)
        self._socket.close()


class Poller:
    """Waits for words of near peers, and for a call from another thread of this process."""

    def __init__(self, peers: Mapping[int, LocalPeer]) -> None:
        self._peers = {peer.fileno(): (name, peer) for name, peer in peers.items()}
        self._full: set[int] = set()
        self._called, self._caller = socket.socketpair()
        self._called.setblocking(False)
        self._caller.setblocking(False)
        self._poll = select.poll()
        for descriptor in (*self._peers, self._called.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    def call(self) -> None:
        """End the wait of the thread that listens, now or when it comes to it; from any thread."""
        # A full socket holds calls enough that were not answered yet; a closed one has no listener.
        with contextlib.suppress(OSError):
            self._caller.send(b"!")

    def wait(self, seconds: float | None) -> list[int]:
        """The peers that have something to say, once there are any; none after a call or `seconds`."""
        self._watch_full()
        found = []
        for descriptor, _ in self._poll.poll(None if seconds is None else max(0.0, seconds) * 1e3):
            if descriptor in self._peers:
                name, peer = self._peers[descriptor]
                peer.send_rest()
                found.append(name)
            else:
                with contextlib.suppress(BlockingIOError):
                    while len(self._called.recv(4096)) == 4096:
                        pass
        return found

    def forget(self, peer: LocalPeer) -> None:
        """Listen to `peer` no more: it has ended or is lost."""
        if self._peers.pop(peer.fileno(), None) is not None:
            self._poll.unregister(peer.fileno())

    def close(self) -> None:
        self._called.close()
        self._caller.close()

    def _watch_full(self) -> None:
        """Where words wait for room, wake up when there is some."""
        full = {descriptor for descriptor, (_, peer) in self._peers.items() if peer.full}
        for descriptor in (full ^ self._full) & self._peers.keys():
            self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if descriptor in full else 0))
        self._full = full
