"""Authenticated sockets: both ends prove that they know the job's secret.

The supervisor generates the secret and passes it to its agents over their standard input, and they to their
workers; it is never sent over a socket of the job. A listener drops every connection that is not
authenticated: from another user, with wrong or replayed bytes, or silent. None of them delays the others.
Unauthenticated input is only read as fields of fixed length.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

SECRET_BYTES = 32
_MAGIC = b"plait/1\n"
# Connector to listener: its rank and its nonce.
_GREETING = struct.Struct("<8sI16s")
# Listener to connector: its nonce and its proof. Then the connector sends its proof.
_ANSWER = struct.Struct("<16s32s")
_PROOF_BYTES = 32
# The time for authentication, and the maximum number of unauthenticated connections.
PROVE_S = 5.0
MOST_PENDING = 128
_RETRY_S = 0.02


def new_secret() -> bytes:
    """A random secret for one job."""
    return secrets.token_bytes(SECRET_BYTES)


class HandshakeError(OSError):
    """The other end could not be authenticated."""


class StrangerError(HandshakeError):
    """Another process listens at the address of a process of the job."""


@dataclass(frozen=True)
class Address:
    """The address of a listener as text: `unix:name`, `unixpacket:name` or `tcp:host:port`.

    Unix names are abstract (without a file), and known only on this machine.
    """

    text: str

    def open_socket(self) -> socket.socket:
        """A socket of the type that connects to this address."""
        match self.text.partition(":")[0]:
            case "unix":
                return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            case "unixpacket":
                return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    @property
    def target(self) -> str | tuple[str, int]:
        """The argument of `connect` for such a socket."""
        kind, _, rest = self.text.partition(":")
        if kind.startswith("unix"):
            return f"\0{rest}"
        host, _, port = rest.rpartition(":")
        return host, int(port)


def _mac(secret: bytes, role: bytes, purpose: str, rank: int, first: bytes, second: bytes) -> bytes:
    content = b"|".join([role, purpose.encode(), str(rank).encode(), first + second])
    return hmac.new(secret, content, hashlib.sha256).digest()


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a local connection runs as this one's user."""
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


class _Pending:
    """A connection that is not yet authenticated."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.end = time.monotonic() + PROVE_S
        self.rank = -1
        self._received = b""
        self._expected = b""

    def advance(self, secret: bytes, purpose: str) -> bool:
        """Read what has arrived; True once the other end is authenticated. Raises OSError if that fails."""
        wanted = _PROOF_BYTES if self._expected else _GREETING.size
        data = self.connection.recv(wanted - len(self._received))
        if not data:
            raise HandshakeError("the connection was closed")
        self._received += data
        if len(self._received) < wanted:
            return False
        received, self._received = self._received, b""
        if not self._expected:
            self._answer(received, secret, purpose)
            return False
        if not hmac.compare_digest(received, self._expected):
            raise HandshakeError("wrong proof")
        return True

    def _answer(self, greeting: bytes, secret: bytes, purpose: str) -> None:
        magic, self.rank, theirs = _GREETING.unpack(greeting)
        if magic != _MAGIC:
            raise HandshakeError("not a greeting")
        nonce = secrets.token_bytes(16)
        self.connection.send(
            _ANSWER.pack(nonce, _mac(secret, b"listener", purpose, self.rank, theirs, nonce))
        )
        self._expected = _mac(secret, b"connector", purpose, self.rank, nonce, theirs)


class Listener:
    """Accepts connections of the job's processes; `purpose` must be equal on both ends.

    Without a `host`, only processes of this machine can connect; then, with `packets`, the socket keeps
    message boundaries.
    """

    def __init__(
        self, secret: bytes, purpose: str, host: str | None = None, *, packets: bool = False
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        if host is None and sys.platform == "linux":
            # An abstract name, which disappears with the process.
            self.address = Address(f"{'unixpacket' if packets else 'unix'}:plait-{uuid.uuid4().hex}")
            self._socket = self.address.open_socket()
            self._socket.bind(self.address.target)
        else:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.bind((host or "127.0.0.1", 0))
            self.address = Address("tcp:{}:{}".format(*self._socket.getsockname()))
        self._socket.listen(MOST_PENDING)
        self._socket.setblocking(False)
        self._pending: dict[socket.socket, _Pending] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def poll(self, seconds: float) -> Iterator[tuple[int, socket.socket]]:
        """The newly authenticated connections, with their ranks; waits at most `seconds`.

        The returned sockets are in blocking mode.
        """
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._socket:
                self._accept_new()
                continue
            assert isinstance(key.fileobj, socket.socket)
            pending = self._pending.get(key.fileobj)
            if pending is None:  # it was dropped for a newer connection
                continue
            try:
                proven = pending.advance(self._secret, self._purpose)
            except BlockingIOError:
                continue
            except OSError:
                self._drop(pending)
                continue
            if proven:
                self._forget(pending)
                pending.connection.setblocking(True)
                yield pending.rank, pending.connection
        now = time.monotonic()
        for pending in [p for p in self._pending.values() if p.end < now]:
            self._drop(pending)

    def accept(self, end: float) -> tuple[int, socket.socket]:
        """The next authenticated connection, and its rank; TimeoutError at the time `end`."""
        while (left := end - time.monotonic()) > 0:
            for connection in self.poll(min(left, 1.0)):
                return connection
        raise TimeoutError("no process has connected")

    def _accept_new(self) -> None:
        for _ in range(MOST_PENDING):
            try:
                connection, _ = self._socket.accept()
            except OSError:  # none left, or its other end is gone, or no descriptor is free
                return
            if not _is_same_user(connection):
                connection.close()
                continue
            if len(self._pending) >= MOST_PENDING:
                self._drop(next(iter(self._pending.values())))
            pending = _Pending(connection)
            self._pending[connection] = pending
            self._selector.register(connection, selectors.EVENT_READ)

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.connection.close()

    def close(self) -> None:
        """Stop accepting; connections that were returned stay open."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._selector.close()
        self._socket.close()


def connect(address: Address, secret: bytes, purpose: str, rank: int, seconds: float) -> socket.socket:
    """An authenticated connection to the listener at `address`.

    Retries until `seconds` have passed, as a flooded listener may drop connections.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return _connect_once(address, secret, purpose, rank, end)
        except StrangerError:
            raise
        except OSError as failure:
            if time.monotonic() + _RETRY_S >= end:
                raise TimeoutError(f"no connection within {seconds:.3g} s: {failure}") from failure
        # The listener may be busy, and does not notify when it is free.
        select.select([], [], [], _RETRY_S)


def _connect_once(address: Address, secret: bytes, purpose: str, rank: int, end: float) -> socket.socket:
    connection = address.open_socket()
    try:
        connection.settimeout(min(PROVE_S, max(0.001, end - time.monotonic())))
        connection.connect(address.target)
        if not _is_same_user(connection):
            raise StrangerError("a process of another user listens there")
        nonce = secrets.token_bytes(16)
        connection.sendall(_GREETING.pack(_MAGIC, rank, nonce))
        theirs, proof = _ANSWER.unpack(_receive(connection, _ANSWER.size))
        if not hmac.compare_digest(proof, _mac(secret, b"listener", purpose, rank, nonce, theirs)):
            raise StrangerError("the listener does not know the job's secret")
        connection.sendall(_mac(secret, b"connector", purpose, rank, theirs, nonce))
        connection.settimeout(None)
        return connection
    except BaseException:
        with contextlib.suppress(OSError):
            connection.close()
        raise


def _receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise HandshakeError("the connection was closed")
        data += more
    return data
