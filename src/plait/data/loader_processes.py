"""Loader processes: forked from the worker, reused, and always ended with the worker.

They start in milliseconds, share the worker's data set, and end with the worker, however it ends. torch's
DataLoader forks too, but sends each tensor in a segment of /dev/shm with its own descriptor, so that it fails
in a container with 64 MB there and on batches of many tensors; it wraps exceptions of the data set in another
message, and reads small samples a quarter slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from plait.core.errors import PlaitError
from plait.data import transport, trees

# How many batches each loader prepares in advance.
AHEAD = 2
# How long a loader may take to exit after its pipe was closed.
END_S = 2.0
_PR_SET_PDEATHSIG = 1


def load_stream(items: Iterable[Any], pin: bool, timeout_s: float | None = None) -> Iterator[Any]:
    """The items, none of which is None, read by one process; LoaderError if one takes too long."""
    source = iter(items)
    for item in LoaderPool(1, lambda _: next(source, None), timeout_s).run(itertools.repeat(None), pin):
        if item is None:
            return
        yield item


def load_aside(items: Iterable[Any], timeout_s: float) -> list[Any] | None:
    """The items, made in another process, so that their side effects do not affect this one.

    None if that is impossible: the process takes longer than `timeout_s` for an item or ends, an item cannot
    be sent, or it is made on a GPU. Other exceptions are raised here.
    """
    try:
        return list(load_stream(items, pin=False, timeout_s=timeout_s))
    except (LoaderError, trees.NotHandedOverError):
        return None
    except RuntimeError as failure:
        if "in forked subprocess" in str(failure):  # CUDA
            return None
        raise


class LoaderError(PlaitError):
    """A loader process of this worker has ended or does not answer."""

    everywhere = False


class LoaderPool:
    """A pool of processes; each computes `make(task)` and returns it over its pipe.

    They inherit `make`, and all it refers to, as of the creation of the pool. An answer that takes longer
    than `timeout_s` is a LoaderError. `name` is the name of a process in errors, `hint` the advice if it may
    have run out of memory.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[Any], Any],
        timeout_s: float | None = None,
        name: str = "data.loaders: a loader process",
        hint: str = "Use fewer data.loaders",
    ) -> None:
        self._timeout_s = timeout_s
        self._name, self._hint = name, hint
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # The loaders with outstanding answers, in the order of the tasks.
        self._waiting: list[int] = []
        for _ in range(count):
            self._start(make)
        weakref.finalize(self, _end, os.getpid(), self._pipes, self._processes)

    def _start(self, make: Callable[[Any], Any]) -> None:
        with _pipes_kept:
            self._fork(make)

    def _fork(self, make: Callable[[Any], Any]) -> None:
        ours, theirs = multiprocessing.Pipe()
        _open_pipes.add(ours)
        # The kernel signals the end of the forking thread, which is that of the process only for the main
        # thread.
        tied = threading.current_thread() is threading.main_thread()
        process = multiprocessing.get_context("fork").Process(
            target=_loader_main, args=(theirs, os.getpid(), tied, make), daemon=True
        )
        with warnings.catch_warnings():
            # Forking with threads is safe here, as a loader uses none of the worker's threads or locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def run(self, tasks: Iterable[Any], pin: bool = False) -> Iterator[Any]:
        """The answers to `tasks`, in order; at most AHEAD tasks per loader are taken in advance."""
        while self._waiting:  # from an earlier use that was not finished
            self._answer(pin=False)
        loaders, numbered = len(self._pipes), enumerate(tasks)
        while True:
            for number, task in itertools.islice(numbered, AHEAD * loaders - len(self._waiting)):
                self._ask(number % loaders, task)
            if not self._waiting:
                return
            yield _checked(self._answer(pin))

    def _ask(self, loader: int, task: Any) -> None:
        try:
            transport.send(self._pipes[loader], task)
        except OSError:
            raise self._ended(loader) from None
        self._waiting.append(loader)

    def _answer(self, pin: bool) -> Any:
        loader = self._waiting.pop(0)
        pipe = self._pipes[loader]
        if self._timeout_s is not None and not pipe.poll(self._timeout_s):
            self._processes[loader].kill()
            raise LoaderError(f"data.loaders: no answer within {self._timeout_s:g} s")
        try:
            return transport.receive(pipe, pin)
        except (EOFError, OSError):
            raise self._ended(loader) from None

    def _ended(self, loader: int) -> PlaitError:
        process = self._processes[loader]
        process.join(END_S)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        hint = f"; was memory short? {self._hint}" if code == -signal.SIGKILL else ""
        return LoaderError(f"{self._name} (pid {process.pid}) ended by {how}{hint}")


# The worker's ends of all pipes, which a loader must close.
_open_pipes: weakref.WeakSet[Connection] = weakref.WeakSet()
# Held while a loader is forked and while pipes are closed, which any thread does that collects garbage: one
# that is forked in the middle would close what has that number since.
_pipes_kept = threading.RLock()
os.register_at_fork(after_in_child=_pipes_kept._at_fork_reinit)  # type: ignore[attr-defined]


def _end(owner: int, pipes: list[Connection], processes: list[BaseProcess]) -> None:
    """End the loaders of a deleted pool; does nothing in a forked copy of the pool."""
    if os.getpid() != owner:
        return
    with _pipes_kept:
        for each in pipes:
            each.close()
    deadline = time.monotonic() + END_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _loader_main(conn: Connection, parent: int, tied: bool, make: Callable[[Any], Any]) -> None:
    """The main function of a loader: answer tasks until the worker closes its end, or ends."""
    # Ctrl-C reaches every process of the terminal; the worker handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if tied and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The worker may have ended before the call of prctl.
    if os.getppid() != parent:
        return
    for other in list(_open_pipes):
        other.close()
    # The threads of the worker's pools do not exist after a fork.
    torch.set_num_threads(1)
    try:
        while True:
            task = transport.receive(conn)
            _answer(conn, make, task)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(conn: Connection, make: Callable[[Any], Any], task: Any) -> None:
    try:
        transport.send(conn, make(task))
    except Exception as failure:
        # Nothing was sent yet: the batch could not be made, or cannot be sent.
        transport.send(conn, _Raised.of(failure))


@dataclass(frozen=True)
class _Raised:
    """An exception raised in a loader: class name, arguments as far as they can be sent, frames."""

    module: str
    name: str
    args: tuple[Any, ...]
    text: str
    frames: str

    @classmethod
    def of(cls, failure: Exception) -> _Raised:
        kind = type(failure)
        given = failure.args
        if isinstance(failure, OSError) and failure.filename is not None:
            given = (failure.errno, failure.strerror, str(failure.filename))
        plain = all(isinstance(arg, (str, int, float, type(None))) for arg in given)
        args = given if plain else (str(failure),)
        return cls(kind.__module__, kind.__qualname__, args, str(failure), _frames(failure))

    def error(self) -> Exception:
        """The exception with its class and message, or only its message if the class cannot be used."""
        made = self._of_its_class() or RuntimeError(f"{self.name}: {self.text}")
        if not isinstance(made, PlaitError):
            made.add_note(f"In a loader process:\n{self.frames}".rstrip())
        return made

    def _of_its_class(self) -> Exception | None:
        # Created without `__init__`, which may need other arguments; a user's class may raise anything.
        with contextlib.suppress(Exception):
            kind = trees.find_class(self.module, self.name)
            for args in (self.args, (self.text,)):
                made = kind.__new__(kind, *args)
                if isinstance(made, Exception) and str(made) == self.text:
                    return made
        return None


def _checked(answer: Any) -> Any:
    if isinstance(answer, _Raised):
        raise answer.error()
    return answer


def _frames(failure: Exception) -> str:
    """The frames of a traceback below this module's, after those of its cause."""
    before = failure.__cause__ or (None if failure.__suppress_context__ else failure.__context__)
    cause = "".join(traceback.format_exception(before)) + "\n" if before is not None else ""
    frames = traceback.extract_tb(failure.__traceback__)
    here = str(Path(__file__).parent)
    theirs = list(itertools.dropwhile(lambda frame: frame.filename.startswith(here), frames))
    return cause + "".join(traceback.format_list(theirs or frames))
