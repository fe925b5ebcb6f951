"""What runs on a node of Ray: an actor that holds the processes of agents and their pipes.

It is sent to the nodes by value with `pipes`, so it uses nothing else but the standard library: the Python of
the agents, which has Plait, may be another one than Ray's.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence

from plait.launcher.launchers.pipes import open_pipes

# The streams of a process.
STREAMS = ("stdout", "stderr")
# Ray sets it by the CPUs of the actor; the agent divides the cores of the host among its workers.
_SET_BY_RAY = ("OMP_NUM_THREADS",)


class AgentHolder:
    """The agents on this node, by number. They end with the actor, since their inputs do.

    Several methods may wait at the same time, each in its own thread.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: list[dict[str, queue.SimpleQueue[str | None]]] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start an agent; returns its number. OSError if the command cannot be run."""
        inherited = {name: value for name, value in os.environ.items() if name not in _SET_BY_RAY}
        self._processes.append(open_pipes(command, {**inherited, **environment}))
        self._lines.append({name: queue.SimpleQueue() for name in STREAMS})
        number = len(self._processes) - 1
        for name in STREAMS:
            threading.Thread(target=self._read, args=(number, name), daemon=True).start()
        return number

    def _read(self, number: int, name: str) -> None:
        for line in getattr(self._processes[number], name):
            self._lines[number][name].put(line)
        self._lines[number][name].put(None)

    def lines(self, number: int, name: str) -> list[str]:
        """The next lines of a stream, waiting for the first; none at its end."""
        lines = self._lines[number][name]
        read = [lines.get()]
        while read[-1] is not None and not lines.empty():
            read.append(lines.get())
        if read[-1] is None and len(read) > 1:
            lines.put(None)
        return [line for line in read if line is not None]

    def write(self, number: int, text: str) -> None:
        """Write to an agent's input; an agent that has ended is noticed by its output."""
        stream = self._processes[number].stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()

    def close(self, number: int) -> None:
        """Close an agent's input, upon which it ends."""
        stream = self._processes[number].stdin
        assert stream is not None
        with contextlib.suppress(OSError):
            stream.close()

    def wait(self, number: int) -> int:
        """Wait for the end of an agent; returns its exit status."""
        return self._processes[number].wait()

    def kill(self, number: int) -> None:
        self._processes[number].kill()
