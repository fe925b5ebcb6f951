"""One process for all of a test run, which has imported torch and traced models: others are forked from it.

It forks the ranks of worlds (support/world.py), commands (support/commands.py) and the workers of
pytest-xdist (support/xdist_worker.py). Whichever needs it first starts it; it ends with the process that
began the test run. A connection brings an order and the descriptors that the new process is to have, and is
answered with its pid and, once it has ended, with its status; anything that comes over it afterwards, or its
end, ends that process.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support.huge_pages import use_huge_pages

HOME, OWNER = "PLAIT_TESTS_SERVER", "PLAIT_TESTS_OWNER"
# Identifies the processes that some tests launch.
MARK = "PLAIT_TEST_LAUNCHED_BY"
_SESSION = "session-"
START_S = 300.0
LOOK_S = 1.0
_MAINS = {"plait": "plait.__main__"} | {
    name: name for name in ("plait.launcher.fork_server", "support.xdist_worker")
}
_MOST_DESCRIPTORS = 8
_CLONE_NEWNET = 0x40000000
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# What the server starts with, whatever the test that needs it first has changed.
_begun: dict[str, Any] = {}


def own() -> None:
    """Have the server of this process, and of those that it starts from now on, end with this process."""
    _begun.update(cwd=os.getcwd(), environment=dict(os.environ))
    if HOME not in os.environ:
        folder = tempfile.mkdtemp(prefix="plait-tests-")
        os.environ[HOME], os.environ[OWNER] = folder, str(os.getpid())
        atexit.register(_disown, folder, os.getpid())


def _disown(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def address() -> str:
    """The address of the server, which is ready by then."""
    if not _begun:
        own()
    place = str(Path(os.environ[HOME]) / "socket")
    with (Path(os.environ[HOME]) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(place).exists():
            _start(place)
    return place


def _start(place: str) -> None:
    # It does not look where this process does. What code makes of a set of words is the same in all runs.
    places = [str(Path(__file__).parent.parent), _begun["environment"].get("PYTHONPATH", "")]
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, places)), "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "support.server", place, os.environ[OWNER]],
        cwd=_begun["cwd"],
        env={**_begun["environment"], **changes},
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,  # the terminal's Ctrl-C is for the tests alone
    )
    # Its imports take seconds, which no world's deadline should pay for.
    end = time.monotonic() + START_S
    while not Path(place).exists():
        assert process.poll() is None, f"the server has ended with status {process.returncode}"
        assert time.monotonic() < end, f"the server was not ready within {START_S:.0f} s"
        time.sleep(0.02)


def sessions_of(mark: str) -> set[int]:
    """The sessions of the commands that were forked with this mark, and of all that these forked."""
    files = Path(os.environ[HOME]).glob(f"{_SESSION}*")
    return {int(file.name.removeprefix(_SESSION)) for file in files if file.read_text() == mark}


class Forked:
    """A process that calls `function(*args)` with all imported; `args` must be picklable, `function` too.

    It prints where this process does, and has its descriptor `descriptor` as number `DESCRIPTOR`.
    """

    DESCRIPTOR = 3

    def __init__(self, function: Callable[..., None], args: Sequence[Any], descriptor: int) -> None:
        call = base64.b64encode(pickle.dumps((function, args))).decode()
        order = {"call": call, "path": sys.path, "descriptors": [1, 2, self.DESCRIPTOR]}
        content = json.dumps(order).encode()
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link.connect(address())
        socket.send_fds(self._link, [len(content).to_bytes(4, "little")], [1, 2, descriptor])
        self._link.sendall(content)
        self._answers = self._link.makefile("r")
        self.pid = int(self._answers.readline())
        self.exitcode: int | None = None

    def kill(self) -> None:
        """End it; it need not have ended when this returns."""
        with contextlib.suppress(OSError):
            self._link.sendall(b"k")

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, but no longer than `seconds`."""
        if self.exitcode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._link, selectors.EVENT_READ)
                if selector.select(seconds):
                    self.exitcode = int(self._answers.readline())
                    self._answers.close()
                    self._link.close()


def main() -> NoReturn:
    """Import what all need, then fork until the owner has ended."""
    place, owner = sys.argv[1], int(sys.argv[2])
    importlib.import_module("support.warm")
    use_huge_pages()
    if not Path(place).parent.exists():  # the test run was interrupted meanwhile
        sys.exit()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{place}.new")
        listener.listen(64)
        os.rename(f"{place}.new", place)
        # Of the module, not of `__main__`: what it forks imports it, too.
        importlib.import_module("support.server").Server(listener, owner).serve()


class Server:
    """Forks and reaps; one thread, so that nothing else is lost in a fork."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self._listener, self._owner = listener, owner
        self._links: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._listener:
                    self._take(self._listener.accept()[0])
                elif key.fd == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                else:
                    self._selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
            self._reap()
            try:
                os.kill(self._owner, 0)
            except ProcessLookupError:
                os._exit(0)

    def _take(self, link: socket.socket) -> None:
        head, descriptors, _, _ = socket.recv_fds(link, 4, _MOST_DESCRIPTORS)
        with link.makefile("rb") as stream:
            content = stream.read(int.from_bytes(head, "little"))
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            _become(server, json.loads(content), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._links[pid] = link
        self._selector.register(link, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            link.sendall(b"%d\n" % pid)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                link = self._links.pop(ended[0])
                with contextlib.suppress(KeyError):
                    self._selector.unregister(link)
                with contextlib.suppress(OSError):
                    link.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
                link.close()


def _become(server: int, order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that `order` describes: never returns."""
    from plait.launcher.fork_server import die_with_parent

    status = 1
    try:
        die_with_parent(server)
        os.setsid()  # what a terminal sends is for the tests alone, or for a stand-in, which passes it on
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if len(descriptors) > len(order["descriptors"]):
            _enter_network(descriptors.pop())
        # First out of the way: the numbers that they are to have may be those of others among them.
        moved = [os.dup2(descriptor, 200 + n) for n, descriptor in enumerate(descriptors)]
        os.closerange(3, 200)
        for source, target in zip(moved, order["descriptors"], strict=True):
            os.dup2(source, target, inheritable=target < 3)
            os.close(source)
        sys.path[:] = order["path"]
        # What tests write lies there. To forget all that was ever found would copy a page of memory for each
        # folder of each package, a third of what an empty process takes.
        for place in sys.path:
            sys.path_importer_cache.pop(place, None)
        atexit._clear()  # what the server's own modules would do at its end
        if "call" in order:
            function, args = pickle.loads(base64.b64decode(order["call"]))
            function(*args)
            status = 0
        else:
            status = _run_command(server, order)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _enter_network(descriptor: int) -> None:
    """Be on the host, in a test, that has this network."""
    if os.fstat(descriptor).st_ino != os.stat("/proc/self/ns/net").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _run_command(server: int, order: dict[str, Any]) -> int:
    """Run the main function of a module as `python -m` does; its exit status."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number in _REQUESTS:
        signal.signal(number, signal.SIG_DFL if number in order["heeded"] else signal.SIG_IGN)
    if signal.SIGINT in order["heeded"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None
    if MARK in os.environ:  # the kernel shows the server's environment
        (Path(os.environ[HOME]) / f"{_SESSION}{os.getpid()}").write_text(os.environ[MARK])
    sys.argv = [order["module"], *order["arguments"]]
    if order["module"] == "plait.launcher.fork_server":
        sys.argv[2] = str(server)  # whom it ends with
    try:
        importlib.import_module(_MAINS[order["module"]]).main()
        return 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


if __name__ == "__main__":
    main()
