"""The connection of a worker, or of the coordinator, to the agent of its host."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time

from plait.launcher import messages
from plait.launcher.membership import Memberships
from plait.launcher.messages import JobMessage, from_line, to_line
from plait.launcher.workers.worker_output import LineBuffer

BEAT_S = 0.5


class AgentLink:
    """The socket to this host's agent: receives requests to stop and answers, sends questions and reports.

    It also sends heartbeats, so that a stopped process is noticed. If the agent ends, this process is killed.
    """

    def __init__(
        self, descriptor: int, memberships: Memberships, is_worker: bool = True, beat_s: float = BEAT_S
    ) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self.memberships = memberships
        self._is_worker = is_worker
        self.stop_requested = False
        self._beat_s = beat_s
        # Answers or, in the coordinator, questions and new memberships.
        self.inbox: queue.SimpleQueue[JobMessage | None] = queue.SimpleQueue()
        for target in (self._receive, self._send_beats):
            threading.Thread(target=target, name="plait-agent-link", daemon=True).start()

    def send(self, message: JobMessage) -> None:
        with self._lock:
            self._socket.sendall(to_line(message))

    def ask(self, question: messages.CoordinatorQuestion) -> messages.CoordinatorAnswer:
        """The coordinator's answer; called by one thread only."""
        self.send(question)
        answer = self.inbox.get()
        assert isinstance(answer, messages.CoordinatorAnswer)
        return answer

    def _receive(self) -> None:
        lines = LineBuffer()
        while data := self._read():
            for line in lines.take(data):
                match from_line(line):
                    case messages.Stop():
                        self.stop_requested = True
                    case messages.NewMembership(membership) if self._is_worker:
                        self.memberships.put(membership)
                    case messages.Dismissal():
                        self.memberships.dismiss()
                    case message:
                        self.inbox.put(message)
        os.kill(os.getpid(), signal.SIGKILL)

    def _read(self) -> bytes:
        try:
            return self._socket.recv(4096)
        except OSError:
            return b""

    def _send_beats(self) -> None:
        while True:
            time.sleep(self._beat_s)
            self.send(messages.Beat())
