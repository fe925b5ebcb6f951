"""Calls in separate processes, so that measurements leave no state in the process that trains.

Steps on meta tensors, and models that are built only to be timed, leave tensors in caches of user code and of
Plait, and state in modules.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from plait.core.errors import PlaitError
from plait.core.names import resolve
from plait.data import transport
from plait.data.loader_processes import LoaderPool
from plait.launcher.failure_cause import describe_status
from plait.launcher.fork_server import die_with_parent

# An upper bound for a measurement.
DEADLINE_S = 900.0
_NAME, _HINT = "a process that measures a sweep's arrays", "Say how many trials an array holds: --width N"


class FreshProcessError(PlaitError):
    """A call failed in its process; the message is one line."""


class FreshProcesses:
    """Calls functions, each in a new process that is like this one was when this object was made.

    To be made before threads and devices are in use, neither of which a forked process can go on with. Calls
    that use a GPU have processes that begin from nothing, since this one may have it in use already. For all
    others `imports` is called once.
    """

    def __init__(self, imports: Callable[[], None]) -> None:
        @functools.cache
        def import_once() -> None:
            imports()

        def call(task: dict[str, Any]) -> dict[str, Any]:
            import_once()
            return _call_forked(task)

        self._pool = LoaderPool(1, call, name=_NAME, hint=_HINT)

    def call(self, function: str, argument: Any, on_gpu: bool = False) -> Any:
        """What `function`, named as module:name, returns for `argument`; both travel as batches do.

        An error of the call is raised here as FreshProcessError.
        """
        if on_gpu:
            answer = _call_spawned(function, argument)
        else:
            threads = torch.get_num_threads()
            (answer,) = self._pool.run([{"function": function, "argument": argument, "threads": threads}])
        if "failure" in answer:
            raise FreshProcessError(answer["failure"])
        return answer["found"]


def _answer(function: str, argument: Any) -> dict[str, Any]:
    try:
        return {"found": resolve(function, "function")(argument)}
    except Exception as failure:
        if type(failure).__module__.startswith("plait."):
            return {"failure": str(failure)}
        return {"failure": f"{type(failure).__name__}: {failure}"}


def _call_forked(task: dict[str, Any]) -> dict[str, Any]:
    """In the process that was forked at first, which does nothing else: make the call in a fork of it."""
    ours, theirs = multiprocessing.Pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            die_with_parent(parent)
            ours.close()
            torch.set_num_threads(task["threads"])
            transport.send(theirs, _answer(task["function"], task["argument"]))
        os._exit(0)
    theirs.close()
    try:
        if not ours.poll(DEADLINE_S):
            raise TimeoutError
        answer: dict[str, Any] = transport.receive(ours)
    except (EOFError, OSError):  # it has ended, or takes too long
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        answer = {"failure": f"{_NAME} gave no answer; was memory short? {_HINT}"}
    finally:
        ours.close()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if "failure" in answer and -status not in (0, signal.SIGKILL):
        answer = {"failure": f"{_NAME} {describe_status(status)}. {_HINT}"}
    return answer


def _call_spawned(function: str, argument: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_spawned, args=(theirs, function, argument), daemon=True)
    process.start()
    theirs.close()
    try:
        ready = wait([ours, process.sentinel], DEADLINE_S)
        if ours in ready:
            with contextlib.suppress(EOFError, OSError):
                answer: dict[str, Any] = transport.receive(ours)
                return answer
        return {"failure": f"{_NAME} gave no answer; was memory short? {_HINT}"}
    finally:
        process.kill()
        process.join()


def _spawned(answers: Connection, function: str, argument: Any) -> None:
    transport.send(answers, _answer(function, argument))
