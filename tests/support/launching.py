"""Launching in tests: a watcher that remembers, and what is left of a process tree."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from plait.launcher.display import Display, WorkerState
from plait.launcher.messages import Launch
from plait.launcher.supervisor import Supervisor
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import Placement
from support.server import MARK, sessions_of


class Memory(Display):
    """Remembers what a supervisor said; `on_start` is called with the supervisor when all workers run."""

    def __init__(self, on_start: Callable[[Memory], None] | None = None) -> None:
        self.lines: list[str] = []
        self.progress: list[Mapping[str, Any]] = []
        self.workers: tuple[WorkerState, ...] = ()
        self.stops = 0
        self.supervisor: Supervisor | None = None
        self.on_start = on_start

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        self.workers = workers
        if self.on_start is not None:
            self.on_start(self)

    def progressed(self, progress: Mapping[str, Any]) -> None:
        self.progress.append(progress)

    def printed(self, line: str) -> None:
        self.lines.append(line)

    def stopping(self) -> None:
        self.stops += 1


def launch_entry(
    entry: str,
    folder: Path,
    memory: Memory,
    *,
    settings: Mapping[str, Any] | None = None,
    prepare: Callable[[], None] = lambda: None,
    **changes: Any,
) -> dict[int, Any]:
    """Run a function of tests/launch/entries.py on two local workers, or where `changes` say."""
    here = str(Path(__file__).parent.parent / "launch")
    values: dict[str, Any] = {
        "hosts": (Host(LOCAL, 2),),
        "timeout_s": 30.0,
        "environment": {
            "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
            MARK: str(os.getpid()),
        },
    }
    placed = {name: value for name, value in {**values, **changes}.items() if name in vars(Placement())}
    others = {name: value for name, value in changes.items() if name not in placed}
    order = Launch(Placement(**placed), f"entries:{entry}", settings or {}, logs=folder / "logs", **others)
    memory.supervisor = Supervisor(order, memory)
    return memory.supervisor.run(prepare)


def agents() -> list[psutil.Process]:
    """The agents that this process has started."""
    children = psutil.Process().children()
    return [child for child in children if "plait.launcher.agent" in " ".join(child.cmdline())]


def pause_agents_then_stop(seconds: float, *, workers_too: Sequence[bool]) -> Callable[[Memory], None]:
    """For `on_start`: pauses all agents, or all processes below this one, in turn, and then stops the job."""

    def act(memory: Memory) -> None:
        for everything in workers_too:
            paused = agents()
            if everything:
                paused += [child for agent in paused for child in agent.children(recursive=True)]
            for process in paused:
                process.suspend()
            time.sleep(seconds)
            for process in paused:
                process.resume()
        assert memory.supervisor is not None
        memory.supervisor.request_stop()

    return lambda memory: threading.Thread(target=act, args=(memory,)).start()


def left_behind() -> list[str]:
    """Living processes of this process's launches: agents below it, and workers, which carry its mark."""
    ours = set(psutil.Process().children(recursive=True))
    sessions = sessions_of(str(os.getpid()))
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            agent = process in ours and "plait.launcher.agent" in line
            worker = process.environ().get(MARK) == str(os.getpid()) or os.getsid(process.pid) in sessions
            if (agent or worker) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(line)
        except (psutil.Error, ProcessLookupError):
            continue
    return found
