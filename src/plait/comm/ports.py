"""The TCP ports that gloo opens: closed as soon as the members of a group have found each other.

gloo listens for as long as its group lives, keeps every connection that a stranger opens, and aborts the
process when it has no descriptor left for one more. Closing its socket from outside would make it abort too,
so another socket takes the place of the listening one. Nothing here needs a capability.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import socket
import sys
from collections.abc import Collection, Iterator

_log = logging.getLogger(__name__)


def listening() -> dict[int, int]:
    """The descriptors on which this process listens for TCP connections, by a number that no other has."""
    return tcp_sockets(listening=True)


def tcp_sockets(listening: bool) -> dict[int, int]:
    """The descriptors of TCP sockets that listen, or do not, by a number that no other has; Linux alone."""
    found: dict[int, int] = {}
    for descriptor in _descriptors("socket:"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            if listens == listening and copy.family in (socket.AF_INET, socket.AF_INET6):
                found[os.fstat(descriptor).st_ino] = descriptor
    return found


def close_ports(before: Collection[int]) -> None:
    """Close the ports that gloo has opened since `listening` gave `before`; connections stay open.

    Called once the group that opened them is made: nobody else may connect from then on.
    """
    for descriptor in _opened_since(before):
        with contextlib.suppress(OSError), _quiet_socket() as quiet:
            for watcher in _watchers():
                _replace(descriptor, quiet, watcher)
    if left := _opened_since(before):
        _warn_once(f"{len(left)} of this process's ports could not be closed to strangers")


def stop_accepting(before: Collection[int]) -> None:
    """Accept no more at ports opened since `before`, of a group that may be about to end in another thread.

    Its descriptors may be closed, and used for something else, at any moment.
    """
    for descriptor in _opened_since(before):
        for watcher in _watchers():
            with contextlib.suppress(OSError):
                watcher.modify(descriptor, 0)


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _opened_since(before: Collection[int]) -> list[int]:
    return [descriptor for identity, descriptor in listening().items() if identity not in before]


def _replace(descriptor: int, quiet: socket.socket, watcher: select.epoll) -> None:
    """Put `quiet` in the place of a socket that `watcher` waits for; nothing where it does not."""
    with contextlib.suppress(OSError):
        watcher.unregister(descriptor)
        os.dup2(quiet.fileno(), descriptor, inheritable=False)
        # gloo takes it out of its set when the group ends, so it must be there; no event is wanted.
        watcher.register(descriptor, 0)


@contextlib.contextmanager
def _quiet_socket() -> Iterator[socket.socket]:
    """A socket that listens where nobody connects, under a name that the kernel chooses.

    A thread of gloo's that is just about to accept finds that there is nothing to accept, and goes on.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as quiet:
        quiet.setblocking(False)
        quiet.bind("")
        quiet.listen(0)
        yield quiet


def _watchers() -> Iterator[select.epoll]:
    """The sets of descriptors that threads of this process wait for."""
    for descriptor in _descriptors("anon_inode:[eventpoll]"):
        with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(descriptor)) as watcher:
            yield watcher


def _descriptors(kind: str) -> list[int]:
    """The descriptors of this process that /proc describes so; none where there is no such folder."""
    found: list[int] = []
    if sys.platform != "linux":
        return found
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(kind):
                    found.append(int(name))
    return found


_warned: set[str] = set()


def _warn_once(words: str) -> None:
    if words not in _warned:
        _warned.add(words)
        _log.warning("%s; see docs/faults.md", words)
