"""`plait report RUN --watch`: the server of the page, asked over real sockets, and what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("starlette", reason="plait[watch] is not installed")
pytest.importorskip("uvicorn", reason="plait[watch] is not installed")

from starlette.requests import Request

from plait.cli import app
from plait.cli.watch import actions_of, run_now
from plait.core import run_events
from plait.core.errors import InputError
from plait.core.events import EventLog
from plait.launcher.run_dir import RunDir
from plait.report.live import live_run, server
from plait.report.live.live_run import LiveRun, RunNow
from plait.report.live.server import Access, listen, make_server
from support.control import endpoint

STATUS: dict[str, Any] = {"state": "running", "updated": 1.0, "workers": [], "progress": {}}
START = run_events.RunStarted("r", "m:f", 100, 2, "cpu", "float32", 640, 64, 20, 0, 0, "2.13")
WAIT_S = 30.0


class WatchedRun:
    """A run without processes: its state is what the test says, its events what it records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = RunNow("starting")
        self.live = LiveRun("r-001", folder, lambda: self.now, lambda: None)
        self._log: EventLog | None = None

    def record(self, *events: run_events.Event) -> None:
        self._log = self._log or EventLog(self.folder / "events" / "rank0.jsonl", 0)
        for event in events:
            self._log.record(event)
        self._log.flush()

    def step(self, number: int) -> None:
        self.record(run_events.Step(number, 0, 1.0 / number, 0.1, 64, 1.0))

    def refreshed(self) -> dict[str, str]:
        """The sections that a refresh has changed."""
        version, _ = self.live.since(0)
        self.live.refresh()
        return self.live.since(version)[1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedRun]:
    monkeypatch.setattr(live_run, "MOST_SHARE", 1e9)
    monkeypatch.setattr(server, "REFRESH_S", 0.01)
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    watched = WatchedRun(tmp_path)
    yield watched
    if watched._log is not None:
        watched._log.close()


class Client:
    """What asks a server of a page; `host` is what it says that it asks."""

    def __init__(self, port: int, access: Access) -> None:
        self.port, self.access = port, access
        self.with_token = f"?token={access.token}"

    def ask(
        self, path: str, method: str = "GET", content: Any = None, **headers: str
    ) -> tuple[int, str, Mapping[str, str]]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)) as link:
            body = content if content is None or isinstance(content, bytes) else json.dumps(content)
            link.request(method, path, body, {key.replace("_", "-"): text for key, text in headers.items()})
            answer = link.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    def act(self, action: str, content: Any) -> tuple[int, dict[str, str]]:
        status, text, _ = self.ask(f"/{action}", "POST", content, X_Plait_Token=self.access.token)
        return status, json.loads(text)

    @contextlib.contextmanager
    def events(self, since: str = "") -> Iterator[Iterator[dict[str, str]]]:
        """The sections of each message."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)) as link:
            link.request("GET", f"/events{self.with_token}&since={since}")
            answer = link.getresponse()
            assert answer.status == 200
            yield (json.loads(line[6:])["sections"] for line in answer if line.startswith(b"data: "))


@contextlib.contextmanager
def served(live: LiveRun, actions: Any = (), is_loopback: bool = True) -> Iterator[Client]:
    listener, access = listen("127.0.0.1", 0)
    access = Access(is_loopback, access.names)
    running = make_server(live, access, dict(actions))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Client(listener.getsockname()[1], access)
    finally:
        running.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive()


def first_with(messages: Iterator[dict[str, str]], section: str, text: str) -> dict[str, str]:
    return next(sections for sections in messages if text in sections.get(section, ""))


def test_a_page_follows_a_run_from_before_its_first_event_over_a_resume_to_its_end(run: WatchedRun):
    with served(run.live) as client:
        status, page, _ = client.ask("/")
        assert (status, "starting" in page, "No events yet" in page) == (200, True, True)
        version = json.loads(page.partition('id="watch-data">')[2].partition("</script>")[0])["id"]
        with client.events(version) as messages:
            run.now = RunNow("running", progress={"step": 1, "steps": 20, "loss": 1.0})
            run.record(START)
            run.step(1)
            sections = first_with(messages, "summary", "1 of 20")
            assert "timeline-data" in sections["timeline"]
            run.step(2)
            # What has not changed is not sent.
            assert {"stages", "changes", "faults", "trials"}.isdisjoint(
                first_with(messages, "summary", "2 of 20")
            )
            run.record(START)
            first_with(messages, "faults", "resumed")
            run.now = RunNow("died", "out of <memory>", next_command="plait train --resume")
            last = first_with(messages, "head", "died")
            assert "out of &lt;memory&gt;" in last["head"]
            assert "next: plait train --resume" in last["head"]
        assert "the run died" in client.ask("/")[1]


def test_what_a_client_has_is_not_sent_again_unless_another_server_sent_it(run: WatchedRun):
    run.record(START)
    with served(run.live) as client:
        page = client.ask("/")[1]
        version = json.loads(page.partition('id="watch-data">')[2].partition("</script>")[0])["id"]
        with client.events("f00d-99") as messages:
            assert set(next(messages)) >= {"head", "summary", "changes"}
        with client.events(version) as messages:
            run.step(3)
            assert "changes" not in next(messages)


def test_a_damaged_event_is_told_and_the_rest_is_shown(run: WatchedRun):
    run.record(START)
    run.step(1)
    with (run.folder / "events" / "rank1.jsonl").open("w") as file:
        file.write("{}\n")
    assert "rank1.jsonl:1: found &#x27;{}&#x27;, expected an event" in run.refreshed()["head"]
    run.step(2)
    assert "2 of 20" in run.refreshed()["summary"]
    assert "not all of it can be shown" in dict(run.live.since(0)[1])["head"]


def test_a_run_that_replaces_a_damaged_one_has_no_note_of_its_damage(run: WatchedRun):
    run.record(START)
    damaged = run.folder / "events" / "rank1.jsonl"
    damaged.write_text("{}\n")
    assert "not all of it can be shown" in run.refreshed()["head"]
    damaged.unlink()
    assert "not all of it can be shown" not in run.refreshed()["head"]


def test_requests_that_come_at_once_are_counted_before_they_are_answered(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "MOST_CLIENTS", 2)
    scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": []}
    site = server._Site(run.live, Access(False, (), token=""), {})

    async def ask() -> list[int]:
        return [getattr(await site._events(Request(scope)), "status_code", 200) for _ in range(3)]

    assert asyncio.run(ask()) == [200, 200, 503]


def test_a_client_that_leaves_makes_room_for_another(run: WatchedRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "MOST_CLIENTS", 1)
    run.record(START)
    with served(run.live) as client:
        with client.events() as messages:
            next(messages)
            assert client.ask("/events")[0] == 503
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(AssertionError), client.events() as messages:
                next(messages)
                break
            assert time.monotonic() < deadline


def test_sections_that_take_long_to_make_are_made_rarely_but_at_once_when_the_state_changes(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live_run, "MOST_SHARE", 1e-9)
    run.record(START)
    run.now = RunNow("running")
    assert "summary" in run.refreshed()
    run.step(1)
    run.now = RunNow("running", progress={"step": 1, "steps": 20})
    assert set(run.refreshed()) == {"head"}
    monkeypatch.setattr(live_run, "SILENT_S", -1.0)
    assert "The curves and what is below them are of" in run.refreshed()["head"]
    run.now = RunNow("finished")
    assert "1 of 20" in run.refreshed()["summary"]


def test_a_run_that_records_nothing_for_long_says_so(run: WatchedRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_run, "SILENT_S", -1.0)
    run.record(START)
    progress = {"step": 1, "steps": 20, "left_s": 60.0}
    run.now = RunNow("running", progress=progress)
    shown = run.refreshed()["head"]
    assert all(text in shown for text in ("Nothing was recorded for", "step 1/20 · 1 min 00 s left"))
    run.now = RunNow("died", progress=progress)
    shown = run.refreshed()["head"]
    assert not any(text in shown for text in ("Nothing was recorded for", "left"))


def test_a_sweep_shows_its_trials_as_they_come(run: WatchedRun):
    run.record(run_events.SweepStarted("s", "m:f", "grid", ("lr",), 2, 0, "loss", 1, "2.13"))
    for trial in range(2):
        run.record(run_events.TrialDrawn(trial, {"lr": 0.1 + trial}, 20, "g"))
        run.record(run_events.TrialStep(trial, 1, 2.0 - trial))
        shown = run.refreshed()["trials"]
        assert shown.count("<tr>") == trial + 2
        # Before there is a result, the one with the lowest training loss is first.
        assert f"<tr><td>{trial}</td>" in shown.split("</tr>")[1]


def test_a_client_that_does_not_read_holds_up_nobody_and_is_sent_the_newest_once_it_reads(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch
):
    """More than its buffers hold is not kept for it."""
    made = [0]

    def refresh() -> None:
        made[0] += 1
        run.live._put({"summary": f"{made[0]} " + "x" * 300_000, "head": "", "controls": ""})

    monkeypatch.setattr(run.live, "refresh", refresh)
    with served(run.live) as client, client.events() as slow, client.events() as quick:
        next(slow)
        deadline = time.monotonic() + WAIT_S
        while made[0] < 60:
            next(quick)
            assert time.monotonic() < deadline
        begun, numbers = made[0], [0]
        while numbers[-1] < begun:
            numbers.append(int(next(slow)["summary"].split()[0]))
            assert time.monotonic() < deadline
        assert len(numbers) < 50


ELSEWHERE = {"is_loopback": False}
WITH_TOKEN = {"X_Plait_Token": "TOKEN"}


@pytest.mark.parametrize(
    ("bound", "path", "headers", "status"),
    [
        ({}, "/", {}, 200),
        ({}, "/", {"Host": "localhost:9000"}, 200),  # through a tunnel
        ({}, "/", {"Host": "[::1]:80"}, 200),
        ({}, "/", {"Host": "evil.example"}, 403),
        ({}, "/events", {"Host": "evil.example"}, 403),
        ({}, "/?token=TOKEN", {"Host": "evil.example"}, 403),
        ({}, "/", {"Origin": "http://evil.example"}, 403),
        ({}, "/", {"Host": "["}, 403),
        (ELSEWHERE, "/", {}, 403),
        (ELSEWHERE, "/?token=no", {}, 403),
        (ELSEWHERE, "/events", {}, 403),
        (ELSEWHERE, "/?token=TOKEN", {"Host": "w0.example"}, 200),
        ({}, "POST /stop", {}, 403),
        ({}, "POST /stop?token=TOKEN", {}, 403),
        ({}, "POST /stop", {"X_Plait_Token": "no"}, 403),
        ({}, "POST /stop", {**WITH_TOKEN, "Origin": "http://evil.example"}, 403),
        ({}, "POST /stop", {**WITH_TOKEN, "Host": "evil.example"}, 403),
        (ELSEWHERE, "POST /stop", {}, 403),
        ({}, "POST /stop", WITH_TOKEN, 200),
        ({}, "/stop?token=TOKEN", {}, 405),
    ],
)
def test_only_the_page_may_act_and_only_those_who_should_may_read(
    run: WatchedRun, bound: Any, path: str, headers: dict[str, str], status: int
):
    done: list[Any] = []

    def stop(content: Any) -> str:
        done.append(content)
        return "done"

    with served(run.live, {"stop": stop}, **bound) as client:
        method, _, path = path.rpartition(" ")
        headers = {key: text.replace("TOKEN", client.access.token) for key, text in headers.items()}
        path = path.replace("TOKEN", client.access.token)
        found, _, _ = client.ask(path, method or "GET", {} if method else None, **headers)
        assert (found, len(done)) == (status, int(bool(method) and status == 200))


def test_the_page_has_buttons_with_the_token_only_and_runs_no_script_but_its_own(run: WatchedRun):
    run.now = RunNow("running", workers=2, can_stop=True, can_resize=True)
    with served(run.live) as client:
        _, page, headers = client.ask("/" + client.with_token)
        assert all(text in page for text in ('data-action="stop"', 'value="2"', client.access.token))
        assert "script-src 'sha256-" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        without = client.ask("/")[1]
        assert 'data-action="stop"' not in without
        assert client.access.token not in without
    run.now = RunNow("stopping", can_stop=True)
    assert "writes no checkpoint" in run.refreshed()["controls"]
    run.now = RunNow("stopped")
    assert run.refreshed()["controls"] == ""


def test_the_buttons_ask_the_job_as_the_commands_do(run: WatchedRun):
    with endpoint(run.folder / "job") as folder:
        folder.status.write_text(json.dumps(STATUS))
        now = run_now(folder)
        assert (now.state, now.can_stop, now.can_resize) == ("running", True, True)
        with served(run.live, actions_of(folder)) as client:
            assert client.act("resize", {"workers": 4}) == (
                200,
                {"answer": "2 workers now, 4 wanted (version 2); see Adaptations."},
            )
            assert client.act("resize", {"workers": 9})[1]["error"].startswith("workers: found 9, expected 1")
            assert client.act("resize", {})[1]["error"] == "workers: found None, expected a whole number"
            many = client.act("resize", {"workers": "4" * 5000})
            assert many == (400, {"error": "found a request of more than 4096 bytes"})
            deep = client.ask("/resize", "POST", b"[" * 4000, X_Plait_Token=client.access.token)
            assert (deep[0], "the request is no JSON" in deep[1]) == (400, True)
    with served(run.live, actions_of(folder)) as client:
        status, answer = client.act("stop", {})
        assert (status, answer["error"]) == (400, f"{folder.path}: not running (died); nothing to stop")
    now = run_now(folder)
    assert (now.state, now.can_stop, now.can_resize) == ("died", False, False)


def test_a_run_that_never_started_and_one_whose_status_is_damaged_are_shown(tmp_path: Path):
    folder = RunDir(tmp_path)
    assert run_now(folder).state == "never started"
    folder.status.write_text("{")
    assert run_now(folder).state == "its status file is damaged"
    assert run_now(RunDir(tmp_path / "none")).state == "its folder is gone"


@pytest.mark.parametrize(
    ("host", "is_loopback", "address"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", True, "localhost"),
        ("127.0.0.2", True, "127.0.0.2"),
        ("::1", True, "[::1]"),
        ("0.0.0.0", False, socket.gethostname()),
    ],
)
def test_only_loopback_is_loopback(host: str, is_loopback: bool, address: str):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    listener, access = listen(host, 0)
    with listener:
        assert (access.is_loopback, access.address) == (is_loopback, address)


def refusal(*words: str) -> str:
    done = CliRunner().invoke(app, ["report", *words, "--watch"])
    assert isinstance(done.exception, InputError), done.output
    return str(done.exception)


def test_what_cannot_be_watched_is_refused_in_one_message(tmp_path: Path):
    run = tmp_path / "runs" / "r-001"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert "found '" in refusal(str(tmp_path / "none"))
    assert "a folder of runs, expected one run" in refusal(str(run.parent))
    assert "expected none of them" in refusal(str(run), "-o", "x.html")
    assert "expected 0 to 65535" in refusal(str(run), "--port", "70000")
    assert "which has no address" in refusal(str(run), "--host", "no.such.host.invalid")
    for option in (("--port", "8000"), ("--host", "0.0.0.0")):
        done = CliRunner().invoke(app, ["report", str(run), *option])
        assert "found without --watch" in str(done.exception)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        assert "Address already in use; use another port" in refusal(str(run), "--port", taken)
    (run / "events").mkdir()
    (run / "events" / "rank0.jsonl").write_text("{}\n")
    assert "expected an event" in refusal(str(run))
