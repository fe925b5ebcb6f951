"""`launch`: run a function on several processes of this machine, for notebooks and tests."""

from __future__ import annotations

import os
import pickle
import selectors
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from plait.core.errors import InputError, LaunchError
from plait.launcher.environment import STORE
from plait.launcher.fork_server import ForkServer, ServerGoneError

T = TypeVar("T")
# How long the others may go on after one has failed: they usually fail because of it.
_AFTER_FAILURE_S = 1.0


def launch(
    fn: Callable[..., T], *args: Any, workers: int = 2, timeout_s: float | None = None, **kwargs: Any
) -> list[T]:
    """What `fn(*args, **kwargs)` returns on each of `workers` new processes of this machine, by rank.

    In the function `plait.init()` connects them, as it does under torchrun. Functions of a notebook or of
    `__main__` are sent by value, so a script needs no `if __name__ == "__main__"`. If a process fails, all
    are ended and its traceback is raised; so they are after `timeout_s`, and when this process ends.
    """
    if workers < 1:
        raise InputError(f"workers: found {workers}, expected at least 1")
    content = cloudpickle.dumps((fn, args, kwargs))
    threads = max(1, (os.cpu_count() or 1) // workers)
    with tempfile.TemporaryDirectory(prefix="plait-launch-") as folder:
        server = ForkServer(["plait.api.world"], [path for path in sys.path if path])
        pipes: list[Connection] = []
        try:
            for rank in range(workers):
                here, there = Pipe()
                pipes.append(here)
                with there:
                    variables = {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(workers),
                        "LOCAL_WORLD_SIZE": str(workers),
                        STORE: str(Path(folder) / "store"),
                    }
                    request = {"variables": variables, "threads": threads}
                    server.fork(f"{__name__}:run_worker", request, [1, 2, there.fileno()])
                here.send_bytes(content)
            return _collect(server, pipes, timeout_s)
        finally:
            server.close()
            for pipe in pipes:
                pipe.close()


def run_worker(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """The main function of a process; the fork server calls it."""
    import torch

    os.environ |= request["variables"]
    torch.set_num_threads(request["threads"])
    with Connection(descriptors[0]) as pipe:
        try:
            fn, args, kwargs = pickle.loads(pipe.recv_bytes())
            answer = (True, fn(*args, **kwargs))
            content = cloudpickle.dumps(answer)
        except BaseException:
            content = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(content)


def _collect(server: ForkServer, pipes: Sequence[Connection], timeout_s: float | None) -> list[Any]:
    """The answers of all processes; LaunchError with the first traceback if one fails."""
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    end = None if timeout_s is None else time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, rank)
        selector.register(server, selectors.EVENT_READ, None)
        while len(answers) + len(failures) < len(pipes):
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = selector.select(left)
            if not ready:
                break
            for key, _ in ready:
                if key.data is None:
                    _read_server(server)
                    continue
                selector.unregister(key.fileobj)
                _take(pipes[key.data], key.data, answers, failures)
            if failures and (end is None or end > time.monotonic() + _AFTER_FAILURE_S):
                end = time.monotonic() + _AFTER_FAILURE_S
    if failures:
        first = next(iter(failures))  # in time: others may have failed because of it
        others = [rank for rank in sorted(failures) if rank != first]
        more = f"\n(worker {', '.join(map(str, others))} failed, too)" if others else ""
        raise LaunchError(f"worker {first} of {len(pipes)} failed:\n{failures[first]}{more}")
    if len(answers) < len(pipes):
        silent = [rank for rank in range(len(pipes)) if rank not in answers]
        raise LaunchError(f"no answer from worker {', '.join(map(str, silent))} within {timeout_s:g} s")
    return [answers[rank] for rank in range(len(pipes))]


def _read_server(server: ForkServer) -> None:
    try:
        server.receive()
    except ServerGoneError:
        raise LaunchError(
            "the process that workers are forked from ended; was the system out of memory?"
        ) from None


def _take(pipe: Connection, rank: int, answers: dict[int, Any], failures: dict[int, str]) -> None:
    try:
        fine, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        failures[rank] = "it ended without an answer (killed, or out of memory?)"
        return
    if fine:
        answers[rank] = value
    else:
        failures[rank] = value
