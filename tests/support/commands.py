"""Commands without the seconds that importing torch takes: they are forked from the server of worlds.

`forked_commands` changes the environment so that each `python -m plait` and each server of workers started
under it is a stand-in (support/forked/sitecustomize.py) for a process forked from one that has imported all
modules. What such a process runs is the same; its place in the tree of processes is not, nor is what it has
imported before: tests of these start real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from plait.launch.fork_server import die_with_parent
from support.world import fork_process

VARIABLE = "PLAIT_TESTS_FORK_FROM"
_MAINS = {"plait": "plait.__main__", "plait.launch.fork_server": "plait.launch.fork_server"}
_MOST_DESCRIPTORS = 4


@contextlib.contextmanager
def forked_commands() -> Iterator[None]:
    """Within it, commands and servers of workers are forked rather than started."""
    places = [str(Path(__file__).parent / "forked"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, _server())
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
        yield


@contextlib.contextmanager
def real_commands() -> Iterator[None]:
    """Within it, they are started as everywhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        yield


@functools.cache
def _server() -> str:
    """The address of the server, which is started with the first use and ends with this process."""
    folder = tempfile.mkdtemp(prefix="plait-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = os.path.join(folder, "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(64)
        atexit.register(fork_process(_serve, listener).kill)
    return address


def _serve(listener: socket.socket) -> NoReturn:
    """Fork a process for each connection, end it where the connection ends, and answer how it ended."""
    die_with_parent(os.getppid())
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                _take(connection, selector)
            elif key.fileobj in selector.get_map():
                key.data()


def _take(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    head, descriptors, _, _ = socket.recv_fds(connection, 4, _MOST_DESCRIPTORS)
    with connection.makefile("rb") as stream:
        content = stream.read(int.from_bytes(head, "little"))
    server, pid = os.getpid(), os.fork()
    if pid == 0:
        _become(server, json.loads(content), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)

    def note_end() -> None:
        _, status = os.waitpid(pid, 0)
        selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        connection.close()

    def note_hang_up() -> None:
        selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)

    selector.register(ended, selectors.EVENT_READ, note_end)
    selector.register(connection, selectors.EVENT_READ, note_hang_up)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % pid)


def _become(server: int, order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that `order` describes: never returns."""
    status: Any = 1
    try:
        die_with_parent(server)
        os.setsid()  # its stand-in passes on what a terminal sends to all
        # First out of the way: those that it is to have may be among those that came.
        moved = [os.dup2(descriptor, 100 + n) for n, descriptor in enumerate(descriptors)]
        os.closerange(3, 100)
        for source, target in zip(moved, order["descriptors"], strict=True):
            os.dup2(source, target)
            os.close(source)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL if number in order["heeded"] else signal.SIG_IGN)
        if signal.SIGINT in order["heeded"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["cwd"])
        sys.path[:] = order["path"]
        importlib.invalidate_caches()
        atexit._clear()  # what the server's own modules would do at its end
        sys.argv = [order["module"], *order["arguments"]]
        if order["module"] == "plait.launch.fork_server":
            sys.argv[2] = str(server)  # whom it ends with
        status = _run(order["module"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(module: str) -> int:
    """Its exit status, with what Python makes of a `SystemExit`."""
    try:
        importlib.import_module(_MAINS[module]).main()
        return 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
