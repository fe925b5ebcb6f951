"""The supervisor: starts one agent a host, passes on what workers say, and ends all of them together.

It imports no torch, so a command is quick to answer; the agents import it while they start.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from plait.cluster.hosts import LOCAL, Host
from plait.core.errors import InputError, LaunchError

START_S = 120.0
GRACE_S = 2.0
END_S = 10.0
LAST_LINES = 20


@dataclass(frozen=True)
class Launch:
    """What to run and where: `entry` and `check` are functions by name, `settings` their JSON argument."""

    hosts: tuple[Host, ...]
    entry: str
    settings: Mapping[str, Any]
    logs: Path
    check: str | None = None
    preload: tuple[str, ...] = ()  # modules imported once a host, before its workers are forked
    shell: str = "ssh {host}"
    python: str = sys.executable
    nic: str | None = None
    threads: int | None = None
    timeout_s: float = 300.0
    link_timeout_s: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    tolerate_loss: bool = False  # the rest goes on when a worker ends; else its end is the job's

    @property
    def workers(self) -> int:
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True)
class WorkerState:
    """One worker as the supervisor knows it."""

    rank: int
    host: str
    pid: int


class Watcher(Protocol):
    """Who is told what happens while the job runs; called from the supervisor's own thread."""

    def started(self, workers: tuple[WorkerState, ...]) -> None: ...
    def progressed(self, progress: Mapping[str, Any]) -> None: ...
    def printed(self, line: str) -> None: ...
    def stopping(self) -> None: ...


class Unwatched:
    """A watcher for launches that nobody looks at."""

    def started(self, workers: tuple[WorkerState, ...]) -> None:
        pass

    def progressed(self, progress: Mapping[str, Any]) -> None:
        pass

    def printed(self, line: str) -> None:
        pass

    def stopping(self) -> None:
        pass


class Supervisor:
    """Runs one launch. Ctrl-C or SIGTERM asks the workers to stop cleanly; a second one ends them at once."""

    def __init__(self, launch: Launch, watcher: Watcher) -> None:
        self._launch = launch
        self._watcher = watcher
        self._messages: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._agents: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._printed = [deque[str](maxlen=LAST_LINES) for _ in launch.hosts]
        self._workers: dict[int, WorkerState] = {}
        self._stops = 0
        self._begun = False

    def run(self, prepare: Callable[[], None] = lambda: None) -> dict[int, Any]:
        """What each rank's entry returned; raises when any worker failed. No process is left behind.

        `prepare` is called once every host has accepted the job, before any worker starts.
        """
        with self._signals_mean_stop():
            try:
                for index in range(len(self._launch.hosts)):
                    self._start_agent(index)
                head = self._await_ready()
                prepare()
                # From here on agents pass a request to stop on, also to workers that nobody has told of yet.
                self._begun = True
                for agent in self._agents:
                    _send(agent, {"go": head})
                return self._await_results()
            finally:
                self._end_agents()

    @contextlib.contextmanager
    def _signals_mean_stop(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {s: signal.signal(s, lambda *_: self.request_stop()) for s in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def request_stop(self) -> None:
        """Ask the workers to finish their step, write a checkpoint and end. Safe in a signal handler."""
        self._messages.put((-1, "stop", None))

    def _start_agent(self, index: int) -> None:
        host = self._launch.hosts[index]
        command = [*self._shell_of(host), self._launch.python, "-u", "-m", "plait.cluster.agent"]
        try:
            agent = subprocess.Popen(
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
        except OSError as failure:
            raise LaunchError(f"{host.name}: cannot run {shlex.join(command)}: {failure.strerror}") from None
        self._agents.append(agent)
        for stream, kind in ((agent.stdout, "message"), (agent.stderr, "line")):
            reader = threading.Thread(target=self._read, args=(index, kind, stream), daemon=True)
            reader.start()
            self._readers.append(reader)
        _send(agent, self._order(index))

    def _shell_of(self, host: Host) -> list[str]:
        if host.name == LOCAL:
            return []
        return shlex.split(self._launch.shell.format(host=shlex.quote(host.name)))

    def _order(self, index: int) -> dict[str, Any]:
        launch, host = self._launch, self._launch.hosts[index]
        return {
            "host": host.name,
            "slots": host.slots,
            "index": index,
            "hosts": len(launch.hosts),
            "cwd": os.getcwd(),
            "environment": dict(launch.environment),
            "entry": launch.entry,
            "check": launch.check,
            "preload": launch.preload,
            "settings": dict(launch.settings),
            "logs": str(launch.logs),
            "nic": launch.nic,
            "threads": launch.threads,
            "timeout_s": launch.timeout_s,
            "link_timeout_s": launch.link_timeout_s,
            "tolerate_loss": launch.tolerate_loss,
        }

    def _read(self, index: int, kind: str, stream: Any) -> None:
        for line in stream:
            message = _decoded(line) if kind == "message" else None
            # A remote shell may greet on the same stream.
            self._messages.put((index, kind, message) if message else (index, "line", line.rstrip("\n")))
        if kind == "message":
            self._messages.put((index, "ended", None))

    def _receive(self, end: float) -> tuple[int, str, Any] | None:
        """The next thing that an agent said, or None at the time `end`; printed lines are passed on."""
        while True:
            try:
                index, kind, value = self._messages.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if kind == "line":
                self._print(index, value)
            elif kind == "stop":
                self._on_stop()
            else:
                return index, kind, value

    def _print(self, index: int, line: str) -> None:
        self._printed[index].append(line)
        self._watcher.printed(line)

    def _on_stop(self) -> None:
        self._stops += 1
        if self._stops > 1:
            raise Interrupted(
                "stopped at once, at a second request; the newest checkpoint is the last one written"
            )
        if not self._begun:
            raise Interrupted("stopped before any worker had started; nothing was run")
        self._watcher.stopping()
        for agent in self._agents:
            _send(agent, {"stop": True})

    def _await_ready(self) -> list[Any]:
        ready: dict[int, list[Any]] = {}
        end = time.monotonic() + START_S
        while len(ready) < len(self._agents):
            message = self._receive(end)
            if message is None:
                silent = [h.name for i, h in enumerate(self._launch.hosts) if i not in ready]
                raise LaunchError(f"no answer from {', '.join(silent)} within {START_S:.0f} s")
            index, kind, value = message
            if kind == "ended":
                raise self._agent_gone(index)
            if "refused" in value:
                raise InputError(value["refused"])
            ready[index] = value["ready"]
        return ready[0]

    def _await_results(self) -> dict[int, Any]:
        results: dict[int, Any] = {}
        failures: list[dict[str, Any]] = []
        running = set(range(len(self._agents)))
        end = float("inf")
        while running:
            message = self._receive(min(end, time.monotonic() + 3600))
            if message is None:
                if time.monotonic() >= end:
                    break
                continue
            index, kind, value = message
            if kind == "ended":
                if index in running and not failures:
                    raise self._agent_gone(index)
                running.discard(index)
            elif "workers" in value:
                self._note_workers(index, value["workers"])
            elif "progress" in value:
                self._watcher.progressed(value["progress"])
            elif "gone" in value:
                self._note_gone(value["gone"])
            elif "lost" in value:
                raise self._link_lost(value)
            elif "done" in value:
                results.update({int(rank): result for rank, result in value["done"].items()})
                running.discard(index)
            elif "failed" in value:
                failures += value["failed"]
                running.discard(index)
                # The other hosts fail only because of this one: hear what they say, then end them.
                end = time.monotonic() + GRACE_S
        if failures:
            raise self._worker_failed(failures)
        return results

    def _note_workers(self, index: int, pids: Mapping[str, int]) -> None:
        host = self._launch.hosts[index].name
        self._workers.update({int(r): WorkerState(int(r), host, pid) for r, pid in pids.items()})
        if len(self._workers) == self._launch.workers:
            self._watcher.started(tuple(self._workers[r] for r in sorted(self._workers)))

    def _note_gone(self, failure: Mapping[str, Any]) -> None:
        """Tell that a worker was lost while the rest goes on."""
        rank, host, words = failure["rank"], failure["host"], failure["summary"]
        log = self._launch.logs / f"rank{rank}.err"
        self._watcher.printed(
            f"warning: worker {rank} on {host} is lost ({words}); the rest goes on (its log: {log})"
        )

    def _agent_gone(self, index: int) -> LaunchError:
        host, agent = self._launch.hosts[index].name, self._agents[index]
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(1.0)
        where = (
            "" if host == LOCAL else f" (reached by {shlex.join(self._shell_of(self._launch.hosts[index]))})"
        )
        # What it said last may still be on its way.
        end = time.monotonic() + 0.3
        while self._receive(end) is not None:
            pass
        said = "\n".join(self._printed[index]) or "(nothing)"
        return LaunchError(
            f"the agent on {host}{where} ended with status {agent.returncode}; it printed:\n{said}"
        )

    def _link_lost(self, value: Mapping[str, Any]) -> LaunchError:
        lost, head = self._launch.hosts[value["host"]].name, self._launch.hosts[0].name
        return LaunchError(
            f"{lost} and {head} could not reach each other for {value['lost']:.0f} s; "
            f"all workers were ended. When the link is back, go on with --resume"
        )

    def _worker_failed(self, failures: list[dict[str, Any]]) -> WorkerError:
        # A worker that only lost a peer knows less than the peer; of the rest the first is the cause.
        cause = min(failures, key=lambda f: (f["peer_lost"], f["time"]))
        return WorkerError(cause, self._launch.logs)

    def _end_agents(self) -> None:
        """End what still runs: hang up, which an agent answers by ending its workers; then kill."""
        for agent in self._agents:
            with contextlib.suppress(OSError):
                assert agent.stdin is not None
                agent.stdin.close()
        end = time.monotonic() + END_S
        for agent in self._agents:
            try:
                agent.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        for reader in self._readers:
            reader.join(max(0.1, end - time.monotonic()))
        # What they printed last has been read by now; later requests to stop have nobody to reach.
        while not self._messages.empty():
            index, kind, value = self._messages.get()
            if kind == "line":
                self._print(index, value)


class WorkerError(LaunchError):
    """A worker failed: which one, on which host, with its own traceback."""

    def __init__(self, failure: Mapping[str, Any], logs: Path) -> None:
        self.rank = int(failure["rank"])
        self.traceback = str(failure["traceback"])
        self.exit_status = int(failure["exit_status"])
        if self.exit_status == InputError.exit_status:
            super().__init__(failure["summary"])
        else:
            place = f"worker {self.rank} on {failure['host']}"
            log = logs / f"rank{self.rank}.err"
            super().__init__(f"{place} failed: {failure['summary']}\nits log: {log}")


class Interrupted(LaunchError):
    """The user ended it before it could end by itself."""

    exit_status = 130


def _decoded(line: str) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _send(agent: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
    # An agent that is gone is noticed by its closed output.
    with contextlib.suppress(OSError, ValueError):
        assert agent.stdin is not None
        agent.stdin.write(json.dumps(message) + "\n")
        agent.stdin.flush()
