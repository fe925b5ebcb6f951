"""What two workers of one host are linked by: a socket of packets, and memory handed over through it.

Memory is a file without a name, so nothing is left behind however a worker ends.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque

import torch
from torch import Tensor

_WITH_FILES = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
_DESCRIPTOR = struct.Struct("i")
# Room next to a packet for one descriptor.
_EXTRA = socket.CMSG_LEN(_DESCRIPTOR.size)


def make_file(size: int) -> int:
    """The descriptor of a new file without a name, which can be mapped and handed to other workers."""
    descriptor = os.memfd_create("plait")
    os.ftruncate(descriptor, size)
    return descriptor


def map_file(descriptor: int, size: int) -> Tensor:
    """The first `size` bytes of a file as memory that all who map it share; the descriptor may be closed."""
    # By its path: Python's mmap would keep a descriptor open for each file.
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)


class PacketSocket:
    """One end of a connection that keeps packets of `packet_bytes` whole. No call waits.

    What a full socket does not take goes out later. `lost` is set where the other end is found gone.
    """

    def __init__(self, connection: socket.socket, packet_bytes: int) -> None:
        self._socket = connection
        self._packet_bytes = packet_bytes
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self.lost = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether packets wait for the peer to read earlier ones."""
        return bool(self._unsent)

    def send(self, packet: bytes, descriptor: int | None = None) -> None:
        """Send a packet, and with it a file, whose `descriptor` is closed here once it is handed over."""
        self._unsent.append((packet, descriptor))
        self.send_unsent()

    def send_unsent(self) -> None:
        """Send what the socket takes now."""
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
                # The peer is gone; the next wait for it reads the end of the connection and reports it.
                pass
            self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def receive(self, with_file: bool = False) -> tuple[bytes, int | None] | None:
        """The next packet; None where nothing has come, or nothing will.

        Where a file may come with it, which takes a little longer, also that file's descriptor.
        """
        while not self.lost:
            extra: list[tuple[int, int, bytes]] = []
            try:
                if with_file:
                    packet, extra, _, _ = self._socket.recvmsg(
                        self._packet_bytes, _EXTRA, socket.MSG_DONTWAIT
                    )
                else:
                    packet = self._socket.recv(self._packet_bytes, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The peer closed without reading all of ours; what it sent before can still be read.
                continue
            except OSError:
                packet = b""
            if packet:
                descriptors = [_DESCRIPTOR.unpack(content)[0] for _, _, content in extra]
                return packet, descriptors[0] if descriptors else None
            self.lost = True
        return None

    def close(self) -> None:
        self._socket.close()
