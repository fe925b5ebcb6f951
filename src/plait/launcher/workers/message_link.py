"""Messages between an agent and another process of its host, which never keep the agent waiting."""

from __future__ import annotations

import os
import threading
from collections import deque

from plait.launcher.messages import JobMessage, from_line, to_line
from plait.launcher.workers.worker_output import LineBuffer


class MessageLink:
    """Messages to and from a process over pipes or a socket. No call blocks: unsent messages are kept."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads = reads
        self._writes: int | None = writes
        for descriptor in (reads, writes):
            os.set_blocking(descriptor, False)
        self._lines = LineBuffer()
        self._unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        # The threads that watch the other hosts send too.
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._reads

    def receive(self) -> tuple[list[JobMessage], bool]:
        """The messages since the last call, and whether more may come."""
        received: list[JobMessage] = []
        while True:
            try:
                data = os.read(self._reads, 1 << 16)
            except BlockingIOError:
                return received, True
            except OSError:
                data = b""
            if not data:
                return received, False
            for line in self._lines.take(data):
                message = from_line(line)
                assert message is not None, f"found {line!r}, expected a message"
                received.append(message)

    def send(self, message: JobMessage) -> None:
        content = memoryview(to_line(message))
        with self._lock:
            self._unsent.append(content)
            self.unsent_bytes += len(content)
        self.flush()

    def flush(self) -> None:
        """Send as much as possible."""
        with self._lock:
            try:
                while self._unsent and self._writes is not None:
                    sent = os.write(self._writes, self._unsent[0])
                    self.unsent_bytes -= sent
                    self._unsent[0] = self._unsent[0][sent:]
                    if not len(self._unsent[0]):
                        self._unsent.popleft()
            except BlockingIOError:
                return
            except OSError:  # the process is gone, which the reader notices
                self._writes = None
            if self._writes is None:
                self._unsent.clear()
                self.unsent_bytes = 0

    def close(self) -> None:
        """Send no more: the descriptor may be reused from now on."""
        with self._lock:
            self._writes = None
