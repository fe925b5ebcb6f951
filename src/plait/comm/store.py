"""The job's key-value store, which all its processes read, write and wait on.

One server, in the agent of the first host, serves the whole job. It has the operations of torch's TCPStore,
which process groups need, and accepts only authenticated clients. It does not import torch.
"""

from __future__ import annotations

import contextlib
import enum
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plait.comm.handshake import Address, Listener, connect
from plait.core.errors import LostPeer, PeerError

PURPOSE = "store"
# The maximum size of a frame; a longer one is an error.
MOST_BYTES = 64 << 20
# The minimum timeout of an answer, as the server's process may be paused.
ANSWER_S = 10.0

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16


class Op(enum.IntEnum):
    """The operation that a client requests."""

    SET = 1
    GET = 2
    ADD = 3
    COMPARE_SET = 4
    CHECK = 5
    WAIT = 6
    DELETE = 7
    APPEND = 8
    COUNT = 9


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


@dataclass(eq=False)
class _Client:
    """A client's connection on the server."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Wait:
    """A client that waits for keys; with `value`, it wants the value of the only key."""

    client: _Client
    missing: set[bytes]
    end: float
    key: bytes | None


class StoreServer(threading.Thread):
    """Serves the store until the process ends; `address` is where its clients connect.

    Without a `host`, only processes of this machine can connect.
    """

    def __init__(self, secret: bytes, host: str | None = None) -> None:
        super().__init__(name="plait-store", daemon=True)
        self._listener = Listener(secret, PURPOSE, host)
        self.address = self._listener.address
        self._values: dict[bytes, bytes] = {}
        self._waits: dict[bytes, list[_Wait]] = {}
        self._all_waits: set[_Wait] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = False
        self.start()

    def run(self) -> None:
        while not self._closed:
            for key, events in self._selector.select(self._seconds_left()):
                if key.fileobj is self._listener:
                    self._take_clients()
                else:
                    self._serve(key.data, events)
            self._end_waits()

    def close(self) -> None:
        """Stop the thread within a second, and close all connections; for tests."""
        self._closed = True
        self.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Client):
                key.data.connection.close()
        self._listener.close()

    def _seconds_left(self) -> float:
        ends = [wait.end for wait in self._all_waits]
        return max(0.0, min([1.0, *(end - time.monotonic() for end in ends)]))

    def _take_clients(self) -> None:
        for _, connection in self._listener.poll(0.0):
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _Client(connection))

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client)
            if events & selectors.EVENT_READ:
                self._receive(client)
        except BlockingIOError:
            return
        except (OSError, ValueError, IndexError):
            # It is gone, or sends invalid data.
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        data = client.connection.recv(_CHUNK)
        if not data:
            raise ConnectionError
        client.received += data
        while len(client.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(client.received)
            if length > MOST_BYTES:
                raise ValueError("a frame that is too long")
            end = _LENGTH.size + length
            if len(client.received) < end:
                return
            content = bytes(client.received[_LENGTH.size : end])
            del client.received[:end]
            self._answer(client, *_unpack(content))

    def _answer(self, client: _Client, code: int, fields: list[bytes]) -> None:
        values = self._values
        match Op(code):
            case Op.SET:
                self._put(fields[0], fields[1])
                self._reply(client)
            case Op.GET:
                self._wait(client, {fields[0]}, float(fields[1]), fields[0])
            case Op.WAIT:
                self._wait(client, set(fields[1:]), float(fields[0]), None)
            case Op.ADD:
                try:
                    total = int(values.get(fields[0], b"0")) + int(fields[1])
                except ValueError:
                    self._reply(client, b"the value is no whole number", status=_Status.REFUSED)
                    return
                self._put(fields[0], str(total).encode())
                self._reply(client, str(total).encode())
            case Op.COMPARE_SET:
                self._reply(client, self._compare_set(*fields[:3]))
            case Op.CHECK:
                self._reply(client, b"1" if all(key in values for key in fields) else b"0")
            case Op.DELETE:
                self._reply(client, b"0" if values.pop(fields[0], None) is None else b"1")
            case Op.APPEND:
                self._put(fields[0], values.get(fields[0], b"") + fields[1])
                self._reply(client)
            case Op.COUNT:
                self._reply(client, str(len(values)).encode())

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """As in torch's stores: an absent key equals an empty `expected`."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._put(key, desired)
            return desired
        return expected if current is None else current

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for wait in self._waits.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing and wait in self._all_waits:
                self._all_waits.discard(wait)
                self._grant(wait.client, wait.key)

    def _wait(self, client: _Client, keys: set[bytes], seconds: float, key: bytes | None) -> None:
        missing = {each for each in keys if each not in self._values}
        if not missing:
            self._grant(client, key)
            return
        wait = _Wait(client, missing, time.monotonic() + seconds, key)
        self._all_waits.add(wait)
        for each in missing:
            self._waits.setdefault(each, []).append(wait)

    def _grant(self, client: _Client, key: bytes | None) -> None:
        self._reply(client, *([] if key is None else [self._values[key]]))

    def _end_waits(self) -> None:
        now = time.monotonic()
        for wait in [w for w in self._all_waits if w.end <= now]:
            self._remove(wait)
            self._reply(wait.client, status=_Status.TIMEOUT)

    def _remove(self, wait: _Wait) -> None:
        self._all_waits.discard(wait)
        for key in wait.missing:
            waits = self._waits.get(key, [])
            if wait in waits:
                waits.remove(wait)
            if not waits:
                self._waits.pop(key, None)

    def _reply(self, client: _Client, *fields: bytes, status: _Status = _Status.OK) -> None:
        client.unsent += _pack(status, fields)
        with contextlib.suppress(OSError):  # a lost client is noticed when it is read
            self._send(client)

    def _send(self, client: _Client) -> None:
        try:
            sent = client.connection.send(client.unsent)
            del client.unsent[:sent]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.connection).events != wanted:
            self._selector.modify(client.connection, wanted, client)

    def _drop(self, client: _Client) -> None:
        for wait in [w for w in self._all_waits if w.client is client]:
            self._remove(wait)
        self._selector.unregister(client.connection)
        client.connection.close()


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

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Op.SET, key, value)

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """Wait for the key's value; raises PeerError on timeout."""
        wait_s = self.timeout_s if seconds is None else seconds
        return self._ask(Op.GET, key, str(wait_s), wait_s=wait_s)[0]

    def add(self, key: str, number: int) -> int:
        """Add to the key's number, initially 0; returns the sum."""
        return int(self._ask(Op.ADD, key, str(number))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Atomic compare-and-set; an absent key equals an empty `expected`. Returns the value afterwards."""
        return self._ask(Op.COMPARE_SET, key, expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys have values."""
        return self._ask(Op.CHECK, *keys)[0] == b"1"

    def wait(self, keys: Sequence[str], seconds: float | None = None) -> None:
        """Wait until all keys have values; raises PeerError on timeout."""
        wait_s = self.timeout_s if seconds is None else seconds
        self._ask(Op.WAIT, str(wait_s), *keys, wait_s=wait_s)

    def delete_key(self, key: str) -> bool:
        """Delete the key; returns whether it had a value."""
        return self._ask(Op.DELETE, key)[0] == b"1"

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Op.APPEND, key, value)

    def num_keys(self) -> int:
        return int(self._ask(Op.COUNT)[0])

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _ask(self, op: Op, *fields: str | bytes, wait_s: float = 0.0) -> list[bytes]:
        question = _pack(op, [each.encode() if isinstance(each, str) else each for each in fields])
        try:
            with self._connection() as connection:
                connection.settimeout(wait_s + self._answer_s)
                connection.sendall(question)
                status, reply = _unpack(_receive_frame(connection))
        except OSError as failure:
            raise PeerError(f"the job's store does not answer: {failure}", LostPeer.GONE) from failure
        if status == _Status.TIMEOUT:
            keys = ", ".join(str(each) for each in (fields[1:4] if op is Op.WAIT else fields[:1]))
            raise StoreTimeout(f"waited {wait_s:g} s for another worker to set {keys}", LostPeer.SILENT)
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
        more = connection.recv(_CHUNK)
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
        if length is None and len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            del data[: _LENGTH.size]
    return bytes(data)
