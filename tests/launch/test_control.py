"""The control endpoint: only who knows the token changes the workers of a job, in ways that make sense."""

from __future__ import annotations

import json
import select
import socket
import struct
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.core.errors import InputError
from plait.launcher import control
from plait.launcher.control import ask_job, serving
from plait.launcher.membership_decisions import StaleVersionError
from plait.launcher.run_dir import RunDir
from support.control import endpoint


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunDir]:
    with endpoint(tmp_path / "run") as found:
        yield found


def request(folder: RunDir, method: str, body: bytes | None = None, **changes: str) -> tuple[int, Any]:
    known = json.loads(folder.control.read_text())
    headers = {"Authorization": changes.get("authorization", f"Bearer {known['token']}")}
    asked = urllib.request.Request(changes.get("url", known["url"]), body, headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as failure:
        return failure.code, json.loads(failure.read() or b"{}")


def test_the_number_of_workers_is_changed_only_with_the_latest_version(folder: RunDir):
    now = ask_job(folder)
    assert (now["workers"], now["version"], now["members"], now["is_settled"]) == (2, 1, [0, 1], True)
    assert now["pids"] == {"0": 1000, "1": 1001}
    assert ask_job(folder, {"workers": 4, "version": 1})["version"] == 2
    with pytest.raises(StaleVersionError, match="version: found 1, but the number of workers has changed"):
        ask_job(folder, {"workers": 3, "version": 1})
    assert request(folder, "PUT", b'{"workers": 3, "version": 1}')[0] == 409
    assert ask_job(folder)["workers"] == 4


def test_a_list_of_hosts_says_where_workers_are(folder: RunDir):
    found = ask_job(folder, {"hosts": ["w0:1", "w1:2"]})
    assert (found["workers"], found["hosts"]) == (3, {"w0": 1, "w1": 2})


def test_nobody_changes_anything_without_the_token(folder: RunDir):
    assert (folder.control.stat().st_mode & 0o777) == 0o600
    for wrong in ("", "Bearer ", "Bearer wrong", "Basic abc", "Bearer \xff"):
        status, found = request(folder, "PUT", b'{"workers": 4}', authorization=wrong)
        assert (status, found) == (401, {"error": "the token of the run's folder is needed"})
    assert ask_job(folder)["workers"] == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"workers": 5}', "workers: found 5, expected 1 to 4"),
        (b'{"workers": 0}', "workers: found 0, expected 1 to 4"),
        (b'{"workers": true}', "workers: found True, expected a whole number"),
        (b'{"workers": "3"}', "workers: found '3', expected a whole number"),
        (b'{"workers": 2, "hosts": []}', "expected an object with workers or hosts"),
        (b'{"worker": 3}', "expected an object with workers or hosts"),
        (b'{"workers": 3, "versoin": 1}', "unknown field 'versoin'; did you mean 'version'?"),
        (b'{"workers": 1, "without": [9]}', "without: found 9, expected workers of the job"),
        (b'{"workers": 1, "without": 0}', "without: found 0, expected a list"),
        (b'{"hosts": ["w9:1"]}', "hosts: found 'w9', expected hosts that the job has: w0, w1"),
        (b'{"hosts": [1]}', "hosts: found [1], expected a list such as ['w0:2', 'w1:2']"),
        (b"[" * 50_000, "the request is no JSON"),
        (b"\xff\x00", "the request is no JSON"),
        (b"x" * 100_000, "Content-Length: found '100000', expected 65536 bytes at most"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_words(folder: RunDir, body: bytes, words: str):
    status, found = request(folder, "PUT", body)
    assert status == 400
    assert words in found["error"]
    assert ask_job(folder)["version"] == 1


def connect(folder: RunDir) -> socket.socket:
    host, port = urllib.parse.urlsplit(json.loads(folder.control.read_text())["url"]).netloc.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_connections_without_the_token_are_few_and_short_and_keep_nobody_out(
    folder: RunDir, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(control, "MOST_PENDING", 4)
    idle = [connect(folder) for _ in range(20)]
    assert ask_job(folder, {"workers": 3})["workers"] == 3
    crowded_out = [stranger for stranger in idle if is_closed(stranger, 0.0)]
    assert 15 <= len(crowded_out) < 20
    for stranger in set(idle) - set(crowded_out):
        stranger.sendall(b"GET /workers HTTP/1.1\r\nHost: x\r\n")  # and no more of it
    monkeypatch.setattr(control, "PROVE_S", 0.1)
    late = connect(folder)
    assert is_closed(late, 20.0)
    for stranger in [*idle, late]:
        stranger.close()


def is_closed(connection: socket.socket, seconds: float) -> bool:
    """Whether the other end has closed the connection, at the latest after `seconds`."""
    ready, _, _ = select.select([connection], [], [], seconds)
    return bool(ready) and connection.recv(1) == b""


def test_a_connection_that_a_stranger_resets_is_no_error(
    folder: RunDir, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    for sent in (b"", b"GET", b"PUT /workers HTTP/1.1\r\nContent-Length: 9\r\n\r\n"):
        stranger = connect(folder)
        stranger.sendall(sent)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
    # Requests are served one thread each: these have begun after the resets.
    for _ in range(5):
        ask_job(folder)
    assert capfd.readouterr().err == ""
    assert caplog.messages == []


def test_a_job_that_does_not_run_has_no_workers_to_change(tmp_path: Path):
    with pytest.raises(InputError, match="not running; only a running job has workers to change"):
        ask_job(RunDir(tmp_path))


def test_an_address_that_nobody_can_listen_at_is_refused(tmp_path: Path):
    with (
        pytest.raises(InputError, match=r"parallel.control: found '203.0.113.9:1', but cannot listen there"),
        serving(RunDir(tmp_path), "203.0.113.9:1", lambda _: None),
    ):
        pass
