"""The link between two workers of one host: a socket for notices, which also passes file descriptors.

Shared memory is an anonymous file, so nothing remains however a worker ends.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

_WITH_FILES = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
_DESCRIPTOR = struct.Struct("i")
# Space for one descriptor in the ancillary data of a notice.
_EXTRA = socket.CMSG_LEN(_DESCRIPTOR.size)
# The kind of notice, and three numbers.
_NOTICE = struct.Struct("<BqqQ")
_END = 0


def make_file(size: int) -> int:
    """The descriptor of a new anonymous file, which can be mapped and passed to other workers."""
    descriptor = os.memfd_create("plait")
    os.ftruncate(descriptor, size)
    return descriptor


def map_file(descriptor: int, size: int) -> Tensor:
    """Map the first `size` bytes of a file as shared memory; the descriptor may then be closed."""
    # By path, as Python's mmap would keep a descriptor open for each file.
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)


class LocalLink:
    """One end of the connection to a worker of the same host, for notices. No call blocks.

    A notice is a nonzero kind and three numbers. Notices that do not fit into a full socket are sent later.
    `ended` is set if the peer has closed its end deliberately, `lost` if it is gone otherwise.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self.ended = False
        self.lost = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether there are unsent notices because the socket is full."""
        return bool(self._unsent)

    def notify(
        self, kind: int, first: int = 0, second: int = 0, third: int = 0, descriptor: int | None = None
    ) -> None:
        """Send a notice, optionally with a file, whose `descriptor` is closed here after sending."""
        self._unsent.append((_NOTICE.pack(kind, first, second, third), descriptor))
        self.send_unsent()

    def send_unsent(self) -> None:
        """Send queued notices as far as the socket has space."""
        while self._unsent:
            packet, descriptor = self._unsent[0]
            try:
                if descriptor is None:
                    self._socket.send(packet, socket.MSG_DONTWAIT)
                else:
                    files = [(*_WITH_FILES, _DESCRIPTOR.pack(descriptor))]
                    self._socket.sendmsg([packet], files, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                # The peer is gone; the next wait reads the end of the connection and reports it.
                pass
            self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def notices(self, with_files: bool = False) -> Iterator[tuple[int, int, int, int, int | None]]:
        """The received notices: kind, numbers, and the descriptor of the file sent with it.

        Receiving files, with `with_files`, is a little slower.
        """
        while not (self.ended or self.lost):
            extra: list[tuple[int, int, bytes]] = []
            try:
                if with_files:
                    packet, extra, _, _ = self._socket.recvmsg(_NOTICE.size, _EXTRA, socket.MSG_DONTWAIT)
                else:
                    packet = self._socket.recv(_NOTICE.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer closed without reading all our notices; what it sent before can still be read.
                continue
            except OSError:
                packet = b""
            if not packet:
                self.lost = True
            elif packet[0] == _END:
                self.ended = True
            else:
                yield *_NOTICE.unpack(packet), _DESCRIPTOR.unpack(extra[0][2])[0] if extra else None

    def close(self) -> None:
        """Close this end; the peer is notified that it was deliberate."""
        self.notify(_END)
        self._socket.close()
