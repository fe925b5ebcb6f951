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
import queue
import secrets
import select
import socket
import struct
import sys
import threading
import time
import uuid
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


class Listener:
    """Accepts connections of the job's processes; `purpose` must be equal on both ends.

    Without a `host`, only processes of this machine can connect; then, with `packets`, the socket keeps
    message boundaries. Each connection has a thread until it is authenticated, and so delays no other.
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
        # The connections that are not authenticated yet, oldest first, and those that are, with their ranks.
        self._pending: dict[socket.socket, None] = {}
        self._proven: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept_all, name="plait-listener", daemon=True).start()

    def accept(self, end: float | None = None) -> tuple[int, socket.socket]:
        """The next authenticated connection, and its rank; TimeoutError at the time `end`."""
        try:
            return self._proven.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("no process has connected") from None

    def _accept_all(self) -> None:
        with self._socket:
            while not self._closed:
                try:
                    connection, _ = self._socket.accept()
                    is_known = _is_same_user(connection)
                except OSError:  # its other end is gone, or no descriptor is free
                    time.sleep(0.0 if self._closed else _RETRY_S)
                    continue
                with self._lock:
                    if not is_known or self._closed:
                        connection.close()
                        continue
                    if len(self._pending) >= MOST_PENDING:
                        self._drop(next(iter(self._pending)))
                    self._pending[connection] = None
                try:
                    threading.Thread(target=self._take, args=(connection,), daemon=True).start()
                except RuntimeError:  # as many threads as there may be: the other end tries again
                    with self._lock:
                        self._pending.pop(connection, None)
                    connection.close()

    def _take(self, connection: socket.socket) -> None:
        """Authenticate a connection, or close it."""
        with contextlib.suppress(OSError):
            rank = self._authenticate(connection)
            with self._lock:
                if connection in self._pending and not self._closed:
                    del self._pending[connection]
                    self._proven.put((rank, connection))
                    return
        with self._lock:
            self._pending.pop(connection, None)
        connection.close()

    def _authenticate(self, connection: socket.socket) -> int:
        """The rank of the other end, which knows the secret; raises OSError if it does not."""
        end = time.monotonic() + PROVE_S
        magic, rank, theirs = _GREETING.unpack(_receive(connection, _GREETING.size, end))
        if magic != _MAGIC:
            raise HandshakeError("not a greeting")
        nonce = secrets.token_bytes(16)
        proof = _mac(self._secret, b"listener", self._purpose, rank, theirs, nonce)
        connection.sendall(_ANSWER.pack(nonce, proof))
        expected = _mac(self._secret, b"connector", self._purpose, rank, nonce, theirs)
        if not hmac.compare_digest(_receive(connection, _PROOF_BYTES, end), expected):
            raise HandshakeError("wrong proof")
        connection.settimeout(None)
        return int(rank)

    def _drop(self, connection: socket.socket) -> None:
        """Shut down a connection, which its thread then closes."""
        del self._pending[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop accepting; connections that were returned stay open."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        with self._lock:
            for connection in list(self._pending):
                self._drop(connection)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._proven.get_nowait()[1].close()


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
        end = min(end, time.monotonic() + PROVE_S)
        connection.settimeout(max(0.001, end - time.monotonic()))
        connection.connect(address.target)
        if not _is_same_user(connection):
            raise StrangerError("a process of another user listens there")
        nonce = secrets.token_bytes(16)
        connection.sendall(_GREETING.pack(_MAGIC, rank, nonce))
        theirs, proof = _ANSWER.unpack(_receive(connection, _ANSWER.size, end))
        if not hmac.compare_digest(proof, _mac(secret, b"listener", purpose, rank, nonce, theirs)):
            raise StrangerError("the listener does not know the job's secret")
        connection.sendall(_mac(secret, b"connector", purpose, rank, theirs, nonce))
        connection.settimeout(None)
        return connection
    except BaseException:
        with contextlib.suppress(OSError):
            connection.close()
        raise


def _receive(connection: socket.socket, count: int, end: float) -> bytes:
    """Exactly `count` bytes; TimeoutError at the time `end`."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, end - time.monotonic()))
        more = connection.recv(count - len(data))
        if not more:
            raise HandshakeError("the connection was closed")
        data += more
    return data
