"""Sockets that only the job's own processes may use: both ends prove that they know the job's secret.

The supervisor draws the secret and hands it to its agents over their standard input, and they to their
workers; it never crosses a network. A listener drops every connection that does not prove itself: one of
another user, of other bytes, of replayed bytes, or one that says nothing. None of them delays the others.
Nothing that a stranger sends is interpreted beyond its fixed length.
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
# Connector to listener: who it is, and its nonce.
_GREETING = struct.Struct("<8sI16s")
# Listener to connector: its nonce and its proof. Then the connector's own proof.
_ANSWER = struct.Struct("<16s32s")
_PROOF_BYTES = 32
# A connection has this long to prove itself, and this many may be about to.
PROVE_S = 5.0
MOST_PENDING = 128
_RETRY_S = 0.02


def new_secret() -> bytes:
    """A secret for one job."""
    return secrets.token_bytes(SECRET_BYTES)


class HandshakeError(OSError):
    """The other end did not prove that it belongs to the job."""


class StrangerError(HandshakeError):
    """Where the job's own process should listen, someone else does."""


@dataclass(frozen=True)
class Address:
    """Where a listener can be reached, as text: `unix:name`, `unixpacket:name` or `tcp:host:port`.

    A name without a file is known on this machine alone.
    """

    text: str

    def open_socket(self) -> socket.socket:
        """A socket of the kind that connects there."""
        match self.text.partition(":")[0]:
            case "unix":
                return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            case "unixpacket":
                return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    @property
    def target(self) -> str | tuple[str, int]:
        """What such a socket connects to."""
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
    """A connection that is about to prove itself."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.end = time.monotonic() + PROVE_S
        self.rank = -1
        self._received = b""
        self._expected = b""

    def advance(self, secret: bytes, purpose: str) -> bool:
        """Read what has come; True once the other end has proven itself. OSError where it cannot."""
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
        own = secrets.token_bytes(16)
        self.connection.send(_ANSWER.pack(own, _mac(secret, b"listener", purpose, self.rank, theirs, own)))
        self._expected = _mac(secret, b"connector", purpose, self.rank, own, theirs)


class Listener:
    """Accepts connections of the job's own processes; `purpose` is what both ends know it is for.

    Without a `host` to listen at, only processes of this machine can connect; then, with `packets`, what is
    sent in one call is received in one.
    """

    def __init__(
        self, secret: bytes, purpose: str, host: str | None = None, *, packets: bool = False
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        if host is None and sys.platform == "linux":
            # A name in no folder: it ends with the process.
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

    def fileno(self) -> int:
        """A descriptor that is readable whenever `poll` has something to do."""
        return self._selector.fileno()

    def poll(self, seconds: float) -> Iterator[tuple[int, socket.socket]]:
        """The connections that have proven themselves, with the ranks they proved; waits `seconds` at most.

        The sockets are blocking again.
        """
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._socket:
                self._accept_new()
                continue
            assert isinstance(key.fileobj, socket.socket)
            pending = self._pending.get(key.fileobj)
            if pending is None:  # it had to make room for one that has just come
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
        """The next connection that has proven itself, and its rank; TimeoutError at the time `end`."""
        while (left := end - time.monotonic()) > 0:
            for found in self.poll(min(left, 1.0)):
                return found
        raise TimeoutError("nobody has connected")

    def _accept_new(self) -> None:
        for _ in range(MOST_PENDING):
            try:
                connection, _ = self._socket.accept()
            except OSError:  # none is left, or its other end is gone, or there is no descriptor for it
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
        """Accept no more; connections that were handed out stay open."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._selector.close()
        self._socket.close()


def connect(address: Address, secret: bytes, purpose: str, rank: int, seconds: float) -> socket.socket:
    """A connection to the listener at `address`, each end having proven itself to the other.

    Retries until `seconds` have passed: a listener that is flooded by strangers may drop a connection.
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
        # The listener may be busy with others, and sends no notice when it is free.
        select.select([], [], [], _RETRY_S)


def _connect_once(address: Address, secret: bytes, purpose: str, rank: int, end: float) -> socket.socket:
    connection = address.open_socket()
    try:
        connection.settimeout(min(PROVE_S, max(0.001, end - time.monotonic())))
        connection.connect(address.target)
        if not _is_same_user(connection):
            raise StrangerError("a process of another user listens there")
        own = secrets.token_bytes(16)
        connection.sendall(_GREETING.pack(_MAGIC, rank, own))
        theirs, proof = _ANSWER.unpack(_receive(connection, _ANSWER.size))
        if not hmac.compare_digest(proof, _mac(secret, b"listener", purpose, rank, own, theirs)):
            raise StrangerError("the listener does not know the job's secret")
        connection.sendall(_mac(secret, b"connector", purpose, rank, theirs, own))
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
