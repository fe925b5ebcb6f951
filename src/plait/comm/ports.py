"""Closes the TCP ports that gloo opens, as soon as the members of a group are connected.

gloo listens as long as its group exists, keeps every connection that any process opens, and aborts the
process when it runs out of descriptors. Closing its socket would make it abort too, so the listening socket
is replaced by another one. Nothing here needs a capability.
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
    """The descriptors on which this process listens for TCP connections, by inode."""
    return tcp_sockets(listening=True)


def tcp_sockets(listening: bool) -> dict[int, int]:
    """The descriptors of TCP sockets that listen, or that do not, by inode; Linux only."""
    sockets: dict[int, int] = {}
    for descriptor in _descriptors("socket:"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            if listens == listening and copy.family in (socket.AF_INET, socket.AF_INET6):
                sockets[os.fstat(descriptor).st_ino] = descriptor
    return sockets


def close_ports(before: Collection[int]) -> None:
    """Close the ports that gloo has opened since `listening` returned `before`; connections stay open.

    Called after the group that opened them is made; no other process can connect from then on.
    """
    for descriptor in _opened_since(before):
        with contextlib.suppress(OSError), _quiet_socket() as quiet:
            for watcher in _watchers():
                _replace(descriptor, quiet, watcher)
    if left := _opened_since(before):
        _warn_once(f"{len(left)} of this process's ports could not be closed")


def stop_accepting(before: Collection[int]) -> None:
    """Stop accepting at ports opened since `before`, by a group that another thread may be closing.

    Its descriptors may be closed and reused at any moment.
    """
    for descriptor in _opened_since(before):
        for watcher in _watchers():
            with contextlib.suppress(OSError):
                watcher.modify(descriptor, 0)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _opened_since(before: Collection[int]) -> list[int]:
    return [descriptor for identity, descriptor in listening().items() if identity not in before]


def _replace(descriptor: int, quiet: socket.socket, watcher: select.epoll) -> None:
    """Replace a socket in the epoll set `watcher` by `quiet`, if the set contains it."""
    with contextlib.suppress(OSError):
        watcher.unregister(descriptor)
        os.dup2(quiet.fileno(), descriptor, inheritable=False)
        # gloo removes it from its set when the group ends, so it must be registered, without events.
        watcher.register(descriptor, 0)


@contextlib.contextmanager
def _quiet_socket() -> Iterator[socket.socket]:
    """A socket that listens at an autobound abstract name, where no process connects.

    A gloo thread that is about to accept finds nothing to accept, and continues.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as quiet:
        quiet.setblocking(False)
        quiet.bind("")
        quiet.listen(0)
        yield quiet


def _watchers() -> Iterator[select.epoll]:
    """The epoll sets of this process."""
    for descriptor in _descriptors("anon_inode:[eventpoll]"):
        with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(descriptor)) as watcher:
            yield watcher


def _descriptors(kind: str) -> list[int]:
    """The descriptors of this process with this link target in /proc; none without /proc."""
    descriptors: list[int] = []
    if sys.platform != "linux":
        return descriptors
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(kind):
                    descriptors.append(int(name))
    return descriptors


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning("%s; see docs/faults.md", message)
