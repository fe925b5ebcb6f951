"""A worker from its agent's point of view: its process, its output, and the socket between the two."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from pathlib import Path

from plait.comm.running_clock import RunningClock
from plait.launcher import messages
from plait.launcher.workers.message_link import MessageLink
from plait.launcher.workers.worker_output import LineBuffer, LogWriter, visible_text

# With more unread messages than this, lines that workers print go only to their logs.
MOST_UNREAD_BYTES = 4 << 20
# Output without line ends, such as progress bars, is forwarded in parts of this many bytes.
LONGEST_LINE = 1 << 16


class WorkerOutput:
    """One output stream of a worker: appended to its log and forwarded line by line."""

    def __init__(self, prefix: str, log: Path | None, logs: LogWriter, is_stdout: bool) -> None:
        self.read, self.write = os.pipe()
        self._is_stdout = is_stdout
        os.set_blocking(self.read, False)
        self._prefix = prefix
        self._lines = LineBuffer(LONGEST_LINE)
        self._log, self._logs = log, logs
        self.keep(b"")
        # Once closed, the descriptor may be reused for another worker.
        self.closed = False

    def take(self, supervisor: MessageLink) -> bool:
        """Forward the output that has arrived; False at its end."""
        try:
            data = os.read(self.read, 1 << 16)
        except BlockingIOError:
            return True
        self.keep(data)
        for line in self._lines.take(data) if data else self._lines.rest():
            if supervisor.unsent_bytes <= MOST_UNREAD_BYTES:
                text = f"{self._prefix}{visible_text(line)}"
                supervisor.send(messages.OutputLine(text, self._is_stdout))
        return bool(data)

    def keep(self, data: bytes) -> None:
        """Append to the log."""
        if self._log is not None:
            self._logs.append(self._log, data)

    def close(self) -> None:
        self.closed = True
        os.close(self.read)
        if self._log is not None:
            self._logs.close(self._log)


class AgentWorker:
    """A worker as its agent knows it: its process, its output, and the socket between the two."""

    def __init__(
        self, rank: int, host: str, folder: Path | None, logs: LogWriter, clock: RunningClock
    ) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.control, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.link = MessageLink(self.control.fileno(), self.control.fileno())
        prefix = f"[{host} {'coordinator' if rank == messages.COORDINATOR else rank}] "
        name = messages.process_name(rank)
        paths = {kind: folder / f"{name}.{kind}" if folder else None for kind in ("out", "err")}
        self.outputs = [WorkerOutput(prefix, path, logs, kind == "out") for kind, path in paths.items()]
        self.last_seen_s = clock.read()
        self.ended = False
        self.reported_silent = False
        # The heartbeat timeout once it has joined, if the others can continue without it.
        self.lease_s = math.inf

    def descriptors(self) -> list[int]:
        return [*(output.write for output in self.outputs), self.theirs.fileno()]

    def close_child_ends(self) -> None:
        """Close the child's descriptors in this process, so that the child's exit closes them."""
        for output in self.outputs:
            os.close(output.write)
        self.theirs.close()

    def kill(self) -> None:
        if self.pid is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)
