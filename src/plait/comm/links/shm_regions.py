"""Regions: memory of a worker that the others of its host read in place, and notices about what is in it.

Nothing is copied on the way: a notice says that something is ready, and the reader reads it in place. The
writer leaves that memory unchanged until it receives the notice that it has been read.
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
        self.descriptor = make_file(self.size)
        self.flat = map_file(self.descriptor, self.size)

    def close(self) -> None:
        """Show it to nobody any more; those who have seen it keep it, and so does `flat`."""
        if self.descriptor is not None:
            os.close(self.descriptor)


class LocalPeer(LocalLink):
    """Another worker of this host and its region."""

    region: Tensor | None = None

    def show(self, region: SharedBuffer) -> None:
        """Share `region` with the peer; the first notice it gets."""
        assert region.descriptor is not None
        self.notify(_SHOWN, third=region.size, descriptor=os.dup(region.descriptor))

    def see(self, seconds: float) -> None:
        """Wait for the peer's region, its first notice; raises OSError where none comes."""
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
        """Send a notice: two numbers whose meaning both know."""
        self.notify(_TOLD, topic, number)


class Poller:
    """Waits for notices of local peers, and for a call from another thread of this process."""

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
        """The peers that have sent something, once there are any; none after a call or `seconds`."""
        self._watch_full()
        found = []
        for descriptor, _ in self._poll.poll(None if seconds is None else max(0.0, seconds) * 1e3):
            if descriptor in self._peers:
                name, peer = self._peers[descriptor]
                peer.send_unsent()
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
        """Poll for writability while there is unsent data."""
        full = {descriptor for descriptor, (_, peer) in self._peers.items() if peer.has_unsent}
        for descriptor in (full ^ self._full) & self._peers.keys():
            self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if descriptor in full else 0))
        self._full = full
