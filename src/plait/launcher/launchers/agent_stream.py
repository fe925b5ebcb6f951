"""Talks with the agent of a host, which a launcher has started."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading

from plait.launcher import messages
from plait.launcher.launchers import Stream
from plait.launcher.membership_decisions import ControlRequest
from plait.launcher.messages import JobMessage, from_line, to_line

# Agents send a sign of life every few seconds, and so does the supervisor.
BEAT_S = 5.0


class AgentEnd(JobMessage):
    """An agent has ended, or its host's shell."""


# Messages with the index of their agent; or, with -1, a request of this process to stop or to resize.
Inbox = queue.SimpleQueue[tuple[int, JobMessage | ControlRequest]]


class AgentProcess:
    """One agent. Its messages go into a queue; no method blocks on them.

    A thread sends: a shell that does not read must not block the supervisor.
    """

    def __init__(self, index: int, process: Stream, inbox: Inbox, now: float) -> None:
        self.index = index
        self.last_seen_s = now
        self._inbox = inbox
        self._process = process
        self._unsent: queue.SimpleQueue[JobMessage | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_messages, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, message: JobMessage) -> None:
        self._unsent.put(message)

    def close(self) -> None:
        """Close the agent's input after what was sent before."""
        self._unsent.put(None)

    def wait(self, seconds: float) -> int | None:
        """Its exit status, or None if it has not ended within `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> None:
        """Kill it and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def join_readers(self, seconds: float) -> None:
        for reader in self._readers:
            reader.join(seconds)

    def _write(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        # The reader of its output notices an agent that is gone.
        with contextlib.suppress(OSError, ValueError):
            message = self._unsent.get()  # the AgentOrder
            while message is not None:
                stream.write(to_line(message).decode())
                stream.flush()
                try:
                    message = self._unsent.get(timeout=BEAT_S)
                except queue.Empty:
                    message = messages.Beat()
        with contextlib.suppress(OSError):
            stream.close()

    def _read_messages(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A remote shell may print a greeting to the same stream.
            self._inbox.put((self.index, from_line(line) or messages.OutputLine(line.rstrip("\n"))))
        self._inbox.put((self.index, AgentEnd()))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._inbox.put((self.index, messages.OutputLine(line.rstrip("\n"))))
