"""The control endpoint: only who knows the token changes the workers of a job, in ways that make sense."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.core.errors import InputError
from plait.launch.control import ask_job, serving
from plait.launch.roster import StaleVersionError
from plait.launch.run_dir import RunDir
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
        (b'{"workers": 3, "versoin": 1}', "'versoin': expected"),
        (b'{"workers": 1, "without": [9]}', "without: found 9, expected workers of the job"),
        (b'{"workers": 1, "without": 0}', "without: found 0, expected a list"),
        (b'{"hosts": ["w9:1"]}', "hosts: found 'w9', expected hosts that the job has: w0, w1"),
        (b'{"hosts": [1]}', "hosts: found"),
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


def test_a_job_that_does_not_run_has_no_workers_to_change(tmp_path: Path):
    with pytest.raises(InputError, match="not running; only a running job has workers to change"):
        ask_job(RunDir(tmp_path))


def test_an_address_that_nobody_can_listen_at_is_refused(tmp_path: Path):
    with (
        pytest.raises(InputError, match=r"parallel.control: found '203.0.113.9:1', but nobody can listen"),
        serving(RunDir(tmp_path), "203.0.113.9:1", lambda _: None),
    ):
        pass
