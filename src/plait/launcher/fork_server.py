"""The process that a host's workers are forked from: it imports torch once for all of them.

Its agent starts it with one end of a socket pair, so it needs no address and no file. A request contains a
function, its argument and the descriptors for the new process; the exit status of each process is reported.
The kernel kills this process when its agent ends, and the workers when this process ends.
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
# Of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# The most that glibc accepts for the second; larger tensors are mapped and unmapped each time.
_LARGEST_KEPT = 32 << 20
_MOST_KEPT = 1 << 30


def import_all(modules: Iterable[str]) -> None:
    """Import `modules` and exclude their objects from later garbage collections.

    A module that cannot be imported is skipped: the code that needs it raises the error.
    """
    collects = gc.isenabled()
    # Garbage collections took a seventh of the time to import torch, and a later collection of all these
    # objects pauses a step for 0.2 s.
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors in this process, for the next ones.

    By default glibc returns it to the system, and the next tensors get it back page by page. With weight
    stashing, which frees gradients after each microbatch, this took a third of the time of a step on x86; on
    ARM, torch brings another allocator. Does nothing with other C libraries, or where the environment
    configures glibc's allocator.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
    mallopt(_TRIM_THRESHOLD, _MOST_KEPT)


def remove_empty_cache() -> None:
    """Remove the empty cache folder that torch creates in the temporary folder when it is imported.

    If it contains compiled code it stays, as torch's cache for later runs.
    """
    cache_dir_utils = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if cache_dir_utils is not None:
        with contextlib.suppress(OSError):
            os.rmdir(cache_dir_utils.default_cache_dir())


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that forked it ends; `parent` is that thread's pid.

    A stopped process is killed too. Does nothing on systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


class ServerGoneError(Exception):
    """The server has ended, and with it all processes that were forked from it."""


class ForkServer:
    """The agent's side: starts the server, forks workers from it and receives how they end."""

    def __init__(self, modules: Sequence[str], folders: Sequence[str] = ()) -> None:
        """Start the server with `modules` imported; `folders` are appended to the workers' Python path."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(list(folders)), *modules]
        self.process = subprocess.Popen(
            # -P: without the current folder on the path, which would come before Python's own modules.
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
        """Start a process that calls `function(argument, descriptors)`; `receive` returns its pid.

        The first two descriptors become its standard output and error.
        """
        _send(self._socket, {"function": function, "argument": argument}, descriptors)

    def receive(self) -> list[dict[str, Any]]:
        """Messages of the server: `{"started": pid}` in the order of requests, `{"ended": pid, "status": s}`.

        ServerGoneError if the server has ended. Called when the socket is readable.
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
    """Remove the complete messages from `received` and return them."""
    complete = []
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        end = _LENGTH.size + length
        if len(received) < end:
            break
        complete.append(json.loads(bytes(received[_LENGTH.size : end])))
        del received[:end]
    return complete


def main() -> NoReturn:
    """Import the modules of the arguments, then fork on request until the agent ends."""
    keep_freed_memory()
    link, agent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent)
    # Only the supervisor handles Ctrl-C of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_all(sys.argv[4:])
    sys.path += [folder for folder in json.loads(sys.argv[3]) if folder not in sys.path]
    remove_empty_cache()
    _Server(socket.socket(fileno=link)).serve()


class _Server:
    """Forks on request and reaps; it has one thread, because a fork copies only one."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> NoReturn:
        """Serve until the agent has ended, which its end of the socket shows before the kernel's signal."""
        with contextlib.suppress(ConnectionError):
            self._serve()
        os._exit(0)

    def _serve(self) -> NoReturn:
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
            raise ConnectionResetError
        (length,) = _LENGTH.unpack(head)
        content = bytearray()
        while len(content) < length:
            part = self._link.recv(length - len(content))
            if not part:
                raise ConnectionResetError
            content += part
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        ready_read, ready_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            selector.close()
            os.close(ready_read)
            self._become(server, ready_write, json.loads(bytes(content)), descriptors)
        os.close(ready_write)
        # Reported only once the kernel kills it together with this process.
        os.read(ready_read, 1)
        for descriptor in (ready_read, *descriptors):
            os.close(descriptor)
        _send(self._link, {"started": pid})

    def _become(
        self, server: int, ready_write: int, request: dict[str, Any], descriptors: list[int]
    ) -> NoReturn:
        """Run the request in the new process; never returns. Closes `ready_write` after `die_with_parent`."""
        status = 1
        try:
            die_with_parent(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._link.close()
            for descriptor in (self._woken, self._wake, ready_write):
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
            # Remaining threads and process groups could block an ordinary exit.
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
