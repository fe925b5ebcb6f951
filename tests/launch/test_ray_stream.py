"""An agent in an actor, as the supervisor sees it: with a pool of threads in place of Ray's nodes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import SimpleNamespace
from typing import Any

import pytest

from plait.launcher.launchers.ray_agent import AgentHolder
from plait.launcher.launchers.ray_stream import RayStream

DEADLINE_S = 20


class ActorGoneError(Exception):
    """What Ray raises for a call of an actor whose node is lost."""


class CallError(ActorGoneError):
    """What Ray raises for a call that raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Threads:
    """`wait` and `get` of Ray, over futures."""

    exceptions = SimpleNamespace(RayError=ActorGoneError, RayTaskError=CallError)

    def wait(self, references: list[Future[Any]], timeout: float | None) -> tuple[list[Any], list[Any]]:
        done, _ = wait_for(references, timeout)
        return list(done), []

    def get(self, reference: Future[Any]) -> Any:
        try:
            return reference.result(DEADLINE_S)
        except OSError as failure:
            raise CallError(failure) from failure


class Actor:
    """An object whose methods run in threads; once it is `lost`, no call ends."""

    def __init__(self, held: object) -> None:
        self._held = held
        self._pool = ThreadPoolExecutor(8)
        self.lost = threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._held, name)

        def call(*arguments: Any) -> Future[Any]:
            never: Future[Any] = Future()
            return never if self.lost.is_set() else self._pool.submit(method, *arguments)

        return SimpleNamespace(remote=call)


def open_stream(code: str, **environment: str) -> tuple[RayStream, Actor]:
    actor = Actor(AgentHolder())
    return RayStream(Threads(), actor, [sys.executable, "-u", "-c", code], environment), actor


def test_lines_come_in_their_order_until_the_input_is_closed():
    code = "import os, sys\nfor line in sys.stdin: print(line.strip(), os.environ['KEY'])\nsys.exit(3)"
    stream, _ = open_stream(code, KEY="value")
    assert stream.poll() is None
    for number in range(20):
        stream.stdin.write(f"{number}\n")
    stream.stdin.close()
    assert list(stream.stdout) == [f"{number} value\n" for number in range(20)]
    assert list(stream.stderr) == []
    assert stream.wait(DEADLINE_S) == 3


def test_what_is_killed_ends_and_its_output_too():
    stream, _ = open_stream("import sys, time; print('here'); time.sleep(1000)")
    assert next(stream.stdout) == "here\n"
    with pytest.raises(subprocess.TimeoutExpired):
        stream.wait(0.1)
    stream.kill()
    assert stream.wait(DEADLINE_S) == -9
    assert list(stream.stdout) == []


def test_an_agent_on_a_lost_node_ends_when_it_is_killed_though_nothing_answers():
    stream, actor = open_stream("import time; print('here'); time.sleep(1000)")
    assert next(stream.stdout) == "here\n"
    actor.lost.set()
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.extend(stream.stdout))
    reader.start()
    assert stream.poll() is None
    stream.kill()
    reader.join(DEADLINE_S)
    assert not reader.is_alive()
    assert stream.wait() == -9
    with pytest.raises(OSError, match="does not answer"):
        stream.stdin.write("more\n")


def test_a_command_that_cannot_be_run_says_so_and_ends():
    stream = RayStream(Threads(), Actor(AgentHolder()), ["/no/such/python"], {})
    assert "No such file" in "".join(stream.stderr)
    assert list(stream.stdout) == []
    assert stream.wait(DEADLINE_S) == -9
