"""Shared memory regions that the other workers of a host read in place, and notices about their content.

Nothing is copied: a notice says that data is ready, and the reader reads it in place. The writer does not
change that memory until it receives the notice that it has been read.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Mapping

import torch
from torch import Tensor

from plait.comm.links.local import LocalLink, make_file, map_file

_TOLD, _SHOWN = 1, 2


class SharedBuffer:
    """Memory of this worker that can be shared with others; freed with the last process that maps it.

    On systems without anonymous shared memory it is ordinary memory, and cannot be shared.
    """

    def __init__(self, size: int) -> None:
        # The kernel does not map empty files.
        self.size = max(size, 1)
        self.descriptor: int | None = None
        if not hasattr(os, "memfd_create"):
            self.flat = torch.zeros(self.size, dtype=torch.uint8)
            return
        self.descriptor = make_file(self.size)
        self.flat = map_file(self.descriptor, self.size)

    def close(self) -> None:
        """Stop sharing it; peers that have mapped it, and `flat`, stay valid."""
        if self.descriptor is not None:
            os.close(self.descriptor)


class LocalPeer(LocalLink):
    """Another worker of this host and its region."""

    region: Tensor | None = None

    def show(self, region: SharedBuffer) -> None:
        """Share `region` with the peer; this must be the first notice."""
        assert region.descriptor is not None
        self.notify(_SHOWN, third=region.size, descriptor=os.dup(region.descriptor))

    def see(self, seconds: float) -> None:
        """Wait for the peer's region, its first notice; raises OSError on timeout."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        if not poll.poll(max(0.001, seconds) * 1e3):
            raise TimeoutError("nothing has come")
        _, _, _, size, descriptor = next(self.notices(with_files=True), (0, 0, 0, 0, None))
        if descriptor is None:
            raise ConnectionError("the connection has ended")
        self.region = map_file(descriptor, size)
        os.close(descriptor)

    def announce(self, topic: int, number: int) -> None:
        """Send a notice of two numbers."""
        self.notify(_TOLD, topic, number)


class Poller:
    """Waits for notices of local peers, and for wake-ups from other threads of this process."""

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
        """Wake up the waiting thread, or its next wait; may be called from any thread."""
        # A full socket already holds unread wake-ups; a closed one has no reader.
        with contextlib.suppress(OSError):
            self._caller.send(b"!")

    def wait(self, seconds: float | None) -> list[int]:
        """Wait until peers have sent something, and return them; none after a wake-up or `seconds`."""
        self._watch_full()
        ready = []
        for descriptor, _ in self._poll.poll(None if seconds is None else max(0.0, seconds) * 1e3):
            if descriptor in self._peers:
                name, peer = self._peers[descriptor]
                peer.send_unsent()
                ready.append(name)
            else:
                with contextlib.suppress(BlockingIOError):
                    while len(self._called.recv(4096)) == 4096:
                        pass
        return ready

    def forget(self, peer: LocalPeer) -> None:
        """Stop polling `peer`, which has ended or is lost."""
        if self._peers.pop(peer.fileno(), None) is not None:
            self._poll.unregister(peer.fileno())

    def close(self) -> None:
        self._called.close()
        self._caller.close()

    def _watch_full(self) -> None:
        """Poll for writability while there is unsent data."""
        full = {descriptor for descriptor, (_, peer) in self._peers.items() if peer.has_unsent}
        for descriptor in (full ^ self._full) & self._peers.keys():
            self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if descriptor in full else 0))
        self._full = full
