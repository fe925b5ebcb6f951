"""An agent in an actor of Ray, as a process with pipes: what the supervisor talks with."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, cast

from plait.core.names import in_words

# How often this process looks whether it was told to end, while Ray waits for an answer of an actor.
POLL_S = 0.2
# An actor that does not take a message for this long is lost.
WRITE_S = 60.0
# The exit status of an agent that was killed, or is gone with its node.
KILLED = -signal.SIGKILL


class RayStream:
    """An agent in an actor, as a process with pipes."""

    def __init__(self, ray: Any, actor: Any, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._ray = ray
        self._actor = actor
        self._killed = threading.Event()
        self._status: int | None = None
        # The agent's number in the actor, once it is known, and its exit status.
        self._number = actor.start.remote(list(command), dict(environment))
        self._end: Any = None
        self.stdin = cast("IO[str]", _RayInput(self._call))
        self.stdout = self._lines("stdout")
        self.stderr = self._lines("stderr")

    def _call(self, method: str, *arguments: Any, timeout_s: float = math.inf) -> Any:
        """The answer of a method of the actor; OSError if there will be none."""
        end = time.monotonic() + timeout_s
        number = self._await(self._number, end)
        return self._await(getattr(self._actor, method).remote(number, *arguments), end)

    def _await(self, reference: Any, end: float) -> Any:
        while not self._ray.wait([reference], timeout=POLL_S)[0]:
            if self._killed.is_set() or time.monotonic() > end:
                raise OSError("the actor does not answer")
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as failure:
            raise OSError(in_words(failure.cause)) from None
        except self._ray.exceptions.RayError as failure:
            raise OSError(in_words(failure).splitlines()[0]) from None

    def _lines(self, name: str) -> Iterator[str]:
        while True:
            try:
                lines = self._call("lines", name)
            except OSError as failure:
                if name == "stderr" and not self._killed.is_set():
                    yield f"{failure}\n"
                return
            if not lines:
                return
            yield from lines

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while self._status is None:
            self._status = self._look(0.0 if timeout == 0.0 else POLL_S)
            if self._status is None and self._killed.is_set():
                self._status = KILLED
            if self._status is None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("the agent", timeout or 0.0)
        return self._status

    def _look(self, wait_s: float) -> int | None:
        """Its exit status, or None if it has not ended within `wait_s`."""
        try:
            if self._end is None and self._ray.wait([self._number], timeout=wait_s)[0]:
                self._end = self._actor.wait.remote(self._ray.get(self._number))
            if self._end is not None and self._ray.wait([self._end], timeout=wait_s)[0]:
                return int(self._ray.get(self._end))
        except self._ray.exceptions.RayError:
            return KILLED
        return None

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # the actor may be gone
            if self._ray.wait([self._number], timeout=0.0)[0]:
                self._actor.kill.remote(self._ray.get(self._number))
        self._killed.set()


class _RayInput:
    """The input of an agent. Each text has been taken when `write` returns, so their order stays."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def write(self, text: str) -> int:
        self._call("write", text, timeout_s=WRITE_S)
        return len(text)

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self._call("close", timeout_s=WRITE_S)
