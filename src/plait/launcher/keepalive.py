"""Whether the hosts of a job reach each other, tested by TCP keepalive probes of the kernel.

Each agent holds a connection to the agent of the first host. Only keepalive probes are sent, which a host
answers even if its processes are stopped. A closed connection means that an agent has ended, which the
supervisor notices without it.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable

from plait.comm.handshake import Address, Listener, connect
from plait.comm.store import StoreClient
from plait.core.errors import PeerError
from plait.launcher.messages import AgentOrder

PURPOSE = "hosts"
PROBE_S = 1
# How long to wait for the listener of the first host.
OPEN_S = 30.0


def watch_hosts(
    request: AgentOrder, address: str, store: str, secret: bytes, on_lost: Callable[[int], None]
) -> None:
    """From now on call `on_lost` with a host's index once it has been unreachable for `link_timeout_s`.

    The first host watches the others, and each of the others its connection to the first: either side may be
    the one that can still reach the supervisor. An unreachable host is reported once.
    """
    if request.is_single:
        return
    client = StoreClient(Address(store), secret, request.first_rank, OPEN_S)
    timeout_s, index = request.launch.placement.link_timeout_s, request.index
    if index == 0:
        listener = Listener(secret, PURPOSE, address)
        client.set(_KEY, listener.address.text)
        watch = functools.partial(_watch_others, listener, request.most_others, timeout_s, on_lost)
    else:
        watch = functools.partial(_watch_first, client, secret, index, timeout_s, on_lost)
    threading.Thread(target=watch, name="plait-hosts", daemon=True).start()


_KEY = "plait/hosts"


def _watch_others(listener: Listener, others: int, timeout_s: float, on_lost: Callable[[int], None]) -> None:
    for _ in range(others):
        index, connection = listener.accept()
        watch = functools.partial(_watch, connection, index, timeout_s, on_lost)
        threading.Thread(target=watch, name="plait-hosts", daemon=True).start()
    listener.close()


def _watch_first(
    client: StoreClient, secret: bytes, index: int, timeout_s: float, on_lost: Callable[[int], None]
) -> None:
    try:
        address = Address(client.get(_KEY).decode())
        connection = connect(address, secret, PURPOSE, index, OPEN_S)
    except (OSError, PeerError):
        on_lost(index)
        return
    _watch(connection, index, timeout_s, on_lost)


def _watch(connection: socket.socket, index: int, timeout_s: float, on_lost: Callable[[int], None]) -> None:
    """Wait until the connection ends; calls `on_lost` if it does because the other host does not answer."""
    _probe(connection, timeout_s)
    with connection:
        try:
            connection.recv(1)
        except OSError:
            on_lost(index)


def _probe(connection: socket.socket, timeout_s: float) -> None:
    """Let the kernel probe the other host; the connection fails after `timeout_s` without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": PROBE_S,
        "TCP_KEEPINTVL": PROBE_S,
        "TCP_KEEPCNT": max(1, round(timeout_s / PROBE_S)),
        "TCP_USER_TIMEOUT": round(1e3 * timeout_s),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
