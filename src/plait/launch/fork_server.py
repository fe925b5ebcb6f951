"""The process that a host's workers are forked from: it imports torch once for all of them.

Its agent starts it with one end of a socket pair as its only link, so it has no address and no file. A
request names a function and brings its argument and the descriptors that the new process needs; every process
that ends is reported with its status. The kernel ends this process with its agent, and its workers with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from plait.core.names import resolve

_LENGTH = struct.Struct("<I")
_MOST_DESCRIPTORS = 8
_PR_SET_PDEATHSIG = 1


def import_all(modules: Iterable[str]) -> None:
    """Import `modules`; later collections pass over all that is there by then.

    A module that cannot be imported is left to the code that needs it, whose error says why.
    """
    collects = gc.isenabled()
    # A seventh of the time that torch takes went into collections, and each later one through all of it
    # stops a step for 0.2 s.
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def remove_empty_cache() -> None:
    """Remove the folder for compiled code that torch makes in the temporary folder when it is imported.

    Where code was compiled it stays: it is torch's cache for later runs.
    """
    made = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if made is not None:
        with contextlib.suppress(OSError):
            os.rmdir(made.default_cache_dir())


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that forked it ends, `parent` being its process.

    It ends even where it is stopped. Elsewhere than on Linux nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(1)


class ServerGoneError(Exception):
    """The server has ended, and with it all that were forked from it."""


class ForkServer:
    """The agent's side: starts the server, forks workers from it and receives how they end."""

    def __init__(self, modules: Sequence[str], folders: Sequence[str] = ()) -> None:
        """Start it with `modules` imported; workers look for others in `folders` too, after all else."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(list(folders)), *modules]
        self.process = subprocess.Popen(
            # Without the current folder on the path, which comes before Python's own modules.
            [sys.executable, "-P", "-u", "-m", __name__, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
        )
        theirs.close()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, function: str, argument: Any, descriptors: Sequence[int]) -> None:
        """Start a process that calls `function(argument, descriptors)`; its pid comes with `receive`.

        The first two descriptors become its standard output and error.
        """
        _send(self._socket, {"function": function, "argument": argument}, descriptors)

    def receive(self) -> list[dict[str, Any]]:
        """What the server sent: `{"started": pid}` in the order of requests, `{"ended": pid, "status": s}`.

        ServerGoneError where the server has ended. Called when the socket is readable.
        """
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise ServerGoneError
        self._received += data
        return _frames(self._received)

    def close(self) -> None:
        """End the server and all processes that were forked from it, and wait until it has ended."""
        self.process.kill()
        self.process.wait()
        self._socket.close()


def _send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    content = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(content))], list(descriptors))
    connection.sendall(content)


def _frames(received: bytearray) -> list[Any]:
    """The messages that have come whole; they are taken out of `received`."""
    found = []
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        end = _LENGTH.size + length
        if len(received) < end:
            break
        found.append(json.loads(bytes(received[_LENGTH.size : end])))
        del received[:end]
    return found


def main() -> NoReturn:
    """Import what the arguments name, then fork until the agent is gone."""
    link, agent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent)
    # The terminal's Ctrl-C is for the supervisor alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_all(sys.argv[4:])
    sys.path += [folder for folder in json.loads(sys.argv[3]) if folder not in sys.path]
    remove_empty_cache()
    _Server(socket.socket(fileno=link)).serve()


class _Server:
    """Forks on request and reaps; one thread, so that nothing else is lost in a fork."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> NoReturn:
        selector = selectors.DefaultSelector()
        selector.register(self._link, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._link:
                    self._take_request(selector)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
            self._reap()

    def _take_request(self, selector: selectors.BaseSelector) -> None:
        head, descriptors, _, _ = socket.recv_fds(self._link, _LENGTH.size, _MOST_DESCRIPTORS)
        if not head:
            os._exit(0)
        (length,) = _LENGTH.unpack(head)
        content = bytearray()
        while len(content) < length:
            content += self._link.recv(length - len(content))
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        tied, tie = os.pipe()
        pid = os.fork()
        if pid == 0:
            selector.close()
            os.close(tied)
            self._become(server, tie, json.loads(bytes(content)), descriptors)
        os.close(tie)
        # Announced only once it ends with this process, whatever is done to it from then on.
        os.read(tied, 1)
        for descriptor in (tied, *descriptors):
            os.close(descriptor)
        _send(self._link, {"started": pid})

    def _become(self, server: int, tie: int, request: dict[str, Any], descriptors: list[int]) -> NoReturn:
        """Be the new process: never returns. `tie` is closed once it ends with its server."""
        status = 1
        try:
            die_with_parent(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._link.close()
            for descriptor in (self._woken, self._wake, tie):
                os.close(descriptor)
            for target, descriptor in enumerate(descriptors[:2], 1):
                os.dup2(descriptor, target)
                os.close(descriptor)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            resolve(request["function"], "function")(request["argument"], descriptors[2:])
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            # Threads and process groups that are left could hold up an ordinary exit.
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            _send(self._link, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
