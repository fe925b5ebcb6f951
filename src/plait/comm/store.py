"""The job's key-value store, which all its processes read, write and wait on.

One server, in the agent of the first host, serves the whole job. It has the operations of torch's stores
that process groups need, and accepts only authenticated clients. It does not import torch.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from plait.comm.handshake import Address, Listener, connect
from plait.core.errors import LostPeer, PeerError

PURPOSE = "store"
# The maximum size of a frame; a longer one is an error.
MOST_BYTES = 64 << 20
# The minimum timeout of an answer, as the server's process may be paused.
ANSWER_S = 10.0

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16
# How often a thread that waits for a client looks whether it is still there, and tries to start another.
_CHECK_S, _RETRY_S = 1.0, 0.1


class Op(enum.IntEnum):
    """The operation that a client requests."""

    SET = 1
    GET = 2
    ADD = 3
    COMPARE_SET = 4
    CHECK = 5
    WAIT = 6
    DELETE = 7
    COUNT = 8


class _Status(enum.IntEnum):
    OK = 0
    TIMEOUT = 1
    REFUSED = 2


def _pack(code: int, fields: Sequence[bytes]) -> bytes:
    content = bytearray([code])
    for each in fields:
        content += _LENGTH.pack(len(each)) + each
    return _LENGTH.pack(len(content)) + bytes(content)


def _unpack(content: bytes) -> tuple[int, list[bytes]]:
    """The code and fields of a frame; ValueError if it is malformed."""
    if not content:
        raise ValueError("an empty frame")
    fields, offset = [], 1
    while offset < len(content):
        if offset + _LENGTH.size > len(content):
            raise ValueError("a frame that ends in a length")
        (length,) = _LENGTH.unpack_from(content, offset)
        offset += _LENGTH.size
        if offset + length > len(content):
            raise ValueError("a field longer than its frame")
        fields.append(content[offset : offset + length])
        offset += length
    return content[0], fields


class StoreServer(threading.Thread):
    """Serves the store until the process ends; `address` is where its clients connect.

    Without a `host`, only processes of this machine can connect. Each connection has a thread, so that a
    client that waits, or reads slowly, delays no other.
    """

    def __init__(self, secret: bytes, host: str | None = None) -> None:
        super().__init__(name="plait-store", daemon=True)
        self._listener = Listener(secret, PURPOSE, host)
        self.address = self._listener.address
        self._values: dict[bytes, bytes] = {}
        # The values of keys that clients wait for.
        self._awaited: dict[bytes, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self.start()

    def run(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                _, connection = self._listener.accept(time.monotonic() + 1.0)
                self._connections.add(connection)
                self._start(threading.Thread(target=self._serve, args=(connection,), daemon=True))

    def _start(self, thread: threading.Thread) -> None:
        while not self._closed:
            try:
                thread.start()
                break
            except RuntimeError:  # as many threads as there may be: the client waits
                time.sleep(_RETRY_S)

    def close(self) -> None:
        """Stop the thread within a second, and close all connections; for tests."""
        self._closed = True
        self.join()
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        # Until it is gone, or sends invalid data.
        with connection, contextlib.suppress(OSError, ValueError, IndexError, OverflowError):
            while True:
                status, reply = self._answer(connection, *_unpack(_receive_frame(connection)))
                connection.sendall(_pack(status, reply))
        self._connections.discard(connection)

    def _answer(
        self, connection: socket.socket, code: int, fields: list[bytes]
    ) -> tuple[_Status, list[bytes]]:
        try:
            match Op(code):
                case Op.GET:
                    return _Status.OK, self._await(connection, fields[:1], float(fields[1]))
                case Op.WAIT:
                    self._await(connection, fields[:-1], float(fields[-1]))
                    return _Status.OK, []
                case op:
                    with self._lock:
                        return self._answer_at_once(op, fields)
        except TimeoutError:
            return _Status.TIMEOUT, []

    def _answer_at_once(self, op: Op, fields: list[bytes]) -> tuple[_Status, list[bytes]]:
        values = self._values
        match op:
            case Op.SET:
                self._put(fields[0], fields[1])
            case Op.ADD:
                try:
                    total = int(values.get(fields[0], b"0")) + int(fields[1])
                except ValueError:
                    return _Status.REFUSED, [b"the value is no whole number"]
                return self._put(fields[0], str(total).encode())
            case Op.COMPARE_SET:
                key, expected, desired = fields[:3]
                # As in torch's stores: an absent key equals an empty `expected`.
                if values.get(key, b"") == expected:
                    return self._put(key, desired)
                return _Status.OK, [values.get(key, expected)]
            case Op.CHECK:
                return _Status.OK, [b"1" if all(key in values for key in fields) else b"0"]
            case Op.DELETE:
                return _Status.OK, [b"0" if values.pop(fields[0], None) is None else b"1"]
            case Op.COUNT:
                return _Status.OK, [str(len(values)).encode()]
        return _Status.OK, []

    def _put(self, key: bytes, value: bytes) -> tuple[_Status, list[bytes]]:
        self._values[key] = value
        if (awaited := self._awaited.pop(key, None)) is not None:
            awaited.set_result(value)
        return _Status.OK, [value]

    def _await(self, connection: socket.socket, keys: Sequence[bytes], seconds: float) -> list[bytes]:
        """The values of all keys, once they have one; TimeoutError after `seconds`."""
        end = time.monotonic() + seconds
        with self._lock:
            known = [
                self._values[key] if key in self._values else self._awaited.setdefault(key, Future())
                for key in keys
            ]
        return [_result(each, connection, end) if isinstance(each, Future) else each for each in known]


def _result(value: Future[bytes], client: socket.socket, end: float) -> bytes:
    """The value, once it is set; TimeoutError at the time `end`, ConnectionError if the client is gone."""
    while True:
        left = end - time.monotonic()
        try:
            return value.result(min(left, _CHECK_S))
        except TimeoutError:
            if left <= _CHECK_S:
                raise
        with contextlib.suppress(BlockingIOError):
            if not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise ConnectionError("the client is gone")


class StoreTimeout(PeerError):
    """A key had no value within the timeout."""


class StoreClient:
    """A thread-safe client of the store: each call uses a connection exclusively.

    `timeout_s` is the default timeout of waits; `answer_s` that of answers, by default `timeout_s`, but at
    least `ANSWER_S`.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        rank: int,
        timeout_s: float = 300.0,
        answer_s: float | None = None,
    ) -> None:
        self.address = address
        self._secret = secret
        self._rank = rank
        self.timeout_s = timeout_s
        self._answer_s = max(ANSWER_S, timeout_s) if answer_s is None else answer_s
        self._idle: deque[socket.socket] = deque()
        self._prefix = ""

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Op.SET, [key], value)

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """Wait for the key's value; raises PeerError on timeout."""
        return self._await(Op.GET, [key], seconds)[0]

    def add(self, key: str, number: int) -> int:
        """Add to the key's number, initially 0; returns the sum."""
        return int(self._ask(Op.ADD, [key], str(number))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Atomic compare-and-set; an absent key equals an empty `expected`. Returns the value afterwards."""
        return self._ask(Op.COMPARE_SET, [key], expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys have values."""
        return self._ask(Op.CHECK, keys)[0] == b"1"

    def wait(self, keys: Sequence[str], seconds: float | None = None) -> None:
        """Wait until all keys have values; raises PeerError on timeout."""
        self._await(Op.WAIT, keys, seconds)

    def delete_key(self, key: str) -> bool:
        """Delete the key; returns whether it had a value."""
        return self._ask(Op.DELETE, [key])[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(Op.COUNT, [])[0])

    def _await(self, op: Op, keys: Sequence[str], seconds: float | None) -> list[bytes]:
        wait_s = self.timeout_s if seconds is None else seconds
        return self._ask(op, keys, str(wait_s), wait_s=wait_s)

    def _ask(self, op: Op, keys: Sequence[str], *values: str | bytes, wait_s: float = 0.0) -> list[bytes]:
        fields = [*(self._prefix + key for key in keys), *values]
        question = _pack(op, [each.encode() if isinstance(each, str) else each for each in fields])
        try:
            with self._connection() as connection:
                connection.settimeout(wait_s + self._answer_s)
                connection.sendall(question)
                status, reply = _unpack(_receive_frame(connection))
        except OSError as failure:
            raise PeerError(f"the job's store does not answer: {failure}", LostPeer.GONE) from failure
        if status == _Status.TIMEOUT:
            raise StoreTimeout(
                f"waited {wait_s:g} s for another worker to set "
                f"{', '.join(self._prefix + key for key in keys[:3])}",
                LostPeer.SILENT,
            )
        if status != _Status.OK:
            raise ValueError(f"the store refused {op.name} {fields[0]!r}: {reply[0].decode()}")
        return reply

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """Context with an idle or new connection, which is reused later unless an error is raised."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = connect(self.address, self._secret, PURPOSE, self._rank, self._answer_s)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)


def _receive_frame(connection: socket.socket) -> bytes:
    data = bytearray()
    length = None
    while length is None or len(data) < length:
        missing = _LENGTH.size - len(data) if length is None else length - len(data)
        more = connection.recv(min(_CHUNK, missing))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
        if length is None and len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            del data[: _LENGTH.size]
            if length > MOST_BYTES:
                raise ValueError("a frame that is too long")
    return bytes(data)
