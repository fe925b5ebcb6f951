"""Starts the agent of a host, by ssh or another shell unless it is this machine, and talks with it."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import subprocess
import threading

from plait.launcher import messages
from plait.launcher.membership_decisions import ControlRequest
from plait.launcher.messages import JobMessage, from_line, to_line
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import Placement

# Agents send a sign of life every few seconds, and so does the supervisor.
BEAT_S = 5.0


def shell_of(placement: Placement, host: Host) -> list[str]:
    """The prefix of a command that runs on `host`; empty for this machine."""
    return [] if host.name == LOCAL else shlex.split(placement.shell.format(host=shlex.quote(host.name)))


def agent_command(placement: Placement, host: Host) -> list[str]:
    """The command that starts the agent of `host`, without the current folder on its Python path."""
    shell, agent = (
        shell_of(placement, host),
        [placement.interpreter, "-P", "-u", "-m", "plait.launcher.agent"],
    )
    # ssh joins its arguments with spaces, and a shell on the remote host splits them.
    is_ssh = any(os.path.basename(word) == "ssh" for word in shell)
    return [*shell, *(map(shlex.quote, agent) if is_ssh else agent)]


class AgentEnd(JobMessage):
    """An agent has ended, or its host's shell."""


# Messages with the index of their agent; or, with -1, a request of this process to stop or to resize.
Inbox = queue.SimpleQueue[tuple[int, JobMessage | ControlRequest]]


class AgentProcess:
    """One agent, started through its host's shell. Its messages go into a queue; no method blocks on them.

    A thread sends: a shell that does not read must not block the supervisor.
    """

    def __init__(self, index: int, command: list[str], inbox: Inbox, now: float) -> None:
        self.index = index
        self.last_seen_s = now
        self._inbox = inbox
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            bufsize=1,
            # The terminal's Ctrl-C is for the supervisor alone.
            start_new_session=True,
        )
        self._unsent: queue.SimpleQueue[JobMessage | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_messages, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

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
