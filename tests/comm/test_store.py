"""The job's store does what torch's does, wakes who waits, and heeds nobody without the secret."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from plait.comm import store
from plait.comm.handshake import Listener, connect, new_secret
from plait.comm.job_store import JobStore
from plait.comm.store import PURPOSE, Op, StoreClient, StoreServer, _pack
from plait.core.errors import LostPeer, PeerError

SECRET = new_secret()


@pytest.fixture(scope="module", params=[None, "127.0.0.1"], ids=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    made = StoreServer(SECRET, request.param)
    yield made
    made.close()


@pytest.fixture
def client(server: StoreServer) -> StoreClient:
    return StoreClient(server.address, SECRET, 0, timeout_s=10.0)


@pytest.fixture(scope="module")
def torch_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


keys = st.sampled_from(["a", "b", "c"])
texts = st.sampled_from(["", "1", "22", "x"])
operations = st.one_of(
    st.tuples(st.just("set"), keys, texts),
    st.tuples(st.just("add"), keys, st.integers(-3, 3)),
    st.tuples(st.just("compare_set"), keys, texts, texts),
    st.tuples(st.just("check"), st.lists(keys, min_size=1, max_size=3)),
    st.tuples(st.just("delete_key"), keys),
)
runs = iter(range(10**6))


@given(st.lists(operations, max_size=30))
def test_it_answers_as_torchs_own_store_does(
    server: StoreServer, torch_store: dist.Store, operations: list[tuple]
):
    prefix, kept = str(next(runs)), JobStore(StoreClient(server.address, SECRET, 0))
    ours, theirs = dist.PrefixStore(prefix, kept), dist.PrefixStore(prefix, torch_store)
    for name, *arguments in operations:
        if name == "add" and not _is_number(theirs, arguments[0]):
            continue
        answers = [getattr(store, name)(*arguments) for store in (ours, theirs)]
        assert answers[0] == answers[1], (name, arguments)
    for key in "abc":
        assert ours.check([key]) == theirs.check([key])
        if theirs.check([key]):
            assert ours.get(key) == theirs.get(key)


def _is_number(store: dist.Store, key: str) -> bool:
    try:
        return not store.check([key]) or bool(int(store.get(key)) + 1)
    except ValueError:
        return False


def test_who_waits_for_a_value_has_it_as_soon_as_it_is_set(client: StoreClient):
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get, "late", 20.0)
        client.set("late", b"\0value\xff")
        assert waiting.result(20) == b"\0value\xff"


def test_waiting_in_one_thread_keeps_no_other_from_the_store(client: StoreClient):
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(client.wait, [f"w{i}", f"v{i}"], 20.0) for i in range(4)]
        for i in range(4):
            assert not waits[i].done()
            client.set(f"w{i}", "")
            client.set(f"v{i}", "")
        for wait in waits:
            wait.result(20)


def test_a_value_that_nobody_sets_is_reported_as_a_silent_worker(client: StoreClient):
    with pytest.raises(PeerError, match=r"waited 0.05 s for another worker to set never") as caught:
        client.get("never", 0.05)
    assert caught.value.kind is LostPeer.SILENT


def test_a_store_that_is_gone_is_reported_as_such():
    server = StoreServer(SECRET)
    first, second = (StoreClient(server.address, SECRET, 0, answer_s=seconds) for seconds in (20.0, 0.2))
    first.set("x", "1")
    server.close()
    with pytest.raises(PeerError, match="store does not answer") as caught:
        second.get("x")
    assert caught.value.kind is LostPeer.GONE


def test_a_store_that_is_paused_may_answer_as_late_as_the_job_allows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "ANSWER_S", 0.05)
    listener = Listener(SECRET, PURPOSE)

    def answer_late() -> bytes:
        _, connection = listener.accept(time.monotonic() + 20)
        asked = connection.recv(100)
        time.sleep(0.3)
        connection.sendall(struct.pack("<IB", 1, 0))
        return bytes(asked)

    with ThreadPoolExecutor() as pool:
        late = pool.submit(answer_late)
        StoreClient(listener.address, SECRET, 0, timeout_s=20.0).set("key", "value")
        assert b"value" in late.result(20)
    listener.close()


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, b"\0\0\0\0", b"\x05\0\0\0\x63abcd", b"\x02\0\0\0\x02\xff"], ids=range(4)
)
def test_a_client_that_sends_nonsense_is_dropped_alone(server: StoreServer, client: StoreClient, data: bytes):
    client.set("kept", "1")
    broken = connect(server.address, SECRET, PURPOSE, 1, 10.0)
    broken.settimeout(10.0)
    broken.sendall(data)
    with contextlib.suppress(ConnectionResetError):  # where bytes were left unread
        assert broken.recv(1) == b""
    assert client.get("kept") == b"1"


def test_a_client_that_is_gone_while_it_waits_leaves_nothing():
    server = StoreServer(SECRET)

    def reaches(count: int) -> None:
        end = time.monotonic() + 20
        while len(server._connections) != count:
            assert time.monotonic() < end
            threading.Event().wait(0.05)

    waiting = connect(server.address, SECRET, PURPOSE, 1, 10.0)
    waiting.sendall(_pack(Op.GET, [b"never", b"300"]))
    reaches(1)
    waiting.close()
    reaches(0)
    server.close()


def test_without_the_secret_nothing_is_read_or_written(server: StoreServer, client: StoreClient):
    client.set("key", "value")
    stranger = StoreClient(server.address, new_secret(), 0, answer_s=0.2)
    for ask in (lambda: stranger.get("key"), lambda: stranger.set("key", "other")):
        with pytest.raises(PeerError):
            ask()
    assert client.get("key") == b"value"


def test_many_threads_count_together(client: StoreClient):
    client.delete_key("count")
    threads = [threading.Thread(target=lambda: [client.add("count", 1) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.add("count", 0) == 400


def test_torch_waits_on_it_with_a_timeout_of_its_own(server: StoreServer):
    kept = JobStore(StoreClient(server.address, SECRET, 0))
    with pytest.raises(PeerError, match="0.05 s"):
        dist.PrefixStore("p", kept).wait(["nothing"], timedelta(seconds=0.05))
