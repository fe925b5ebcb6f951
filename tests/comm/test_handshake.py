"""Only who knows the job's secret gets a connection, and whatever strangers send delays nobody."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from plait.comm.handshake import MOST_PENDING, Address, Listener, StrangerError, connect, new_secret
from support.capabilities import may

SECRET = new_secret()


@pytest.fixture(params=[None, "127.0.0.1"], ids=["unix", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    made = Listener(SECRET, "a test", request.param)
    yield made
    made.close()


@contextlib.contextmanager
def stranger(listener: Listener, data: bytes = b"") -> Iterator[socket.socket]:
    with listener.address.open_socket() as connection:
        connection.settimeout(10)
        connection.connect(listener.address.target)
        if data:
            connection.sendall(data)
        yield connection


def accepted(
    listener: Listener, secret: bytes = SECRET, purpose: str = "a test", seconds: float = 10.0
) -> int:
    """The rank that the listener accepts when rank 3 connects to it."""

    def come() -> None:
        with contextlib.suppress(OSError):
            connect(listener.address, secret, purpose, 3, seconds).close()

    thread = threading.Thread(target=come)
    thread.start()
    try:
        rank, connection = listener.accept(time.monotonic() + seconds)
        connection.close()
        return rank
    finally:
        thread.join()


def test_two_that_know_the_secret_are_linked(listener: Listener):
    assert accepted(listener) == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 28,
        b"\xfe" * 4096,
        b"plait/1\n" + b"\0" * 20 + b"x" * 32,
    ],
    ids=["nothing", "a number", "http", "zeros", "noise", "a forged proof"],
)
def test_strangers_are_dropped_and_delay_nobody(listener: Listener, data: bytes):
    with contextlib.ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(stranger(listener, data))
        assert accepted(listener) == 3


def test_strangers_that_make_room_for_others_are_forgotten(listener: Listener):
    """So many come at once that the first, which have just said something, are dropped for the last."""
    with contextlib.ExitStack() as strangers:
        for _ in range(3):
            for _ in range(MOST_PENDING):
                made = strangers.enter_context(listener.address.open_socket())
                made.settimeout(0.5)
                with contextlib.suppress(OSError):
                    made.connect(listener.address.target)
                    made.send(b"x")
        assert accepted(listener) == 3


def test_a_stranger_that_closes_at_once_is_forgotten(listener: Listener):
    with stranger(listener):
        pass
    assert accepted(listener) == 3


def test_another_secret_or_another_purpose_is_refused_by_both_ends(listener: Listener):
    for secret, purpose in ((new_secret(), "a test"), (SECRET, "another")):
        with pytest.raises(TimeoutError):
            accepted(listener, secret, purpose, seconds=0.3)


def test_a_listener_that_does_not_know_the_secret_gets_no_proof():
    seen: list[bytes] = []

    def pretend() -> None:
        connection, _ = fake.accept()
        seen.append(connection.recv(28))
        connection.sendall(os.urandom(48))
        with contextlib.suppress(OSError):
            seen.append(connection.recv(32))

    with socket.socket(socket.AF_INET) as fake:
        fake.bind(("127.0.0.1", 0))
        fake.listen()
        thread = threading.Thread(target=pretend)
        thread.start()
        address = Address("tcp:{}:{}".format(*fake.getsockname()))
        with pytest.raises(StrangerError, match="does not know the job's secret"):
            connect(address, SECRET, "a test", 0, 10.0)
        thread.join()
    assert seen[1:] in ([], [b""])


def test_replayed_bytes_prove_nothing(listener: Listener):
    """What one connection sent is sent again: the nonces differ."""
    sent: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *flags: int) -> None:  # type: ignore[override]
            sent.append(bytes(data))
            super().sendall(data, *flags)

    plain = Address.open_socket
    try:
        Address.open_socket = lambda self: Recorded(*_kind(plain(self)))  # type: ignore[method-assign]
        assert accepted(listener) == 3
    finally:
        Address.open_socket = plain  # type: ignore[method-assign]
    greeting, proof = sent
    with stranger(listener, greeting) as replay:
        assert len(replay.recv(48)) == 48
        replay.sendall(proof)
        assert replay.recv(1) == b""
    with pytest.raises(TimeoutError):
        listener.accept(time.monotonic())


def _kind(made: socket.socket) -> tuple[int, int]:
    with made:
        return made.family, made.type


@pytest.mark.skipif(not may("setuid"), reason="needs root, with its capabilities, to become another user")
def test_a_process_of_another_user_is_dropped_before_it_says_anything():
    listener = Listener(SECRET, "a test")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with stranger(listener) as connection:
                os.write(write, b"dropped" if connection.recv(1) == b"" else b"answered")
        finally:
            os._exit(0)
    with pytest.raises(TimeoutError):
        listener.accept(time.monotonic() + 1.0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 100) == b"dropped"
    os.close(read)
    listener.close()


def test_thousands_of_connections_that_say_nothing_leave_room_for_a_peer(listener: Listener):
    strangers = []
    try:
        for _ in range(2000):
            connection = listener.address.open_socket()
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.connect(listener.address.target)
            strangers.append(connection)
        assert accepted(listener) == 3
    finally:
        for connection in strangers:
            connection.close()
