"""`plait report RUN --watch` in a real Chromium, with a job that trains."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser import Browser

pytest.importorskip("starlette", reason="plait[watch] is not installed")
pytest.importorskip("uvicorn", reason="plait[watch] is not installed")
pytestmark = pytest.mark.usefixtures("forked_commands")

# It does not end by itself; its workers sleep in every step rather than keep the machine busy.
JOB = """
name: t
model: plait.workloads.mlp:mlp_tiny
data: {kind: digits, batch_size: 64}
optimizer: {kind: sgd, lr: 0.1}
steps: 1000000
checkpoint: {every_steps: 1000000}
parallel: {workers: 2, elastic: true, jitter: [1.0, 0.05]}
"""
WAIT_S = 60.0


@contextlib.contextmanager
def command(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "plait", *words], cwd=folder, stdout=pipe, stderr=pipe, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=WAIT_S)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


def test_a_page_shows_a_run_while_it_trains_and_its_buttons_steer_it(tmp_path: Path, browser: Browser):
    (tmp_path / "job.yaml").write_text(JOB)
    with command(tmp_path, "train", "job.yaml") as job:
        wait_for(tmp_path / "runs/t-001/status.json")
        with command(tmp_path, "report", "t", "--watch", "--json") as watch:
            assert watch.stdout is not None
            url = json.loads(watch.stdout.readline())["url"]
            for width, dark in ((390, True), (1280, False)):
                browser.open(url, width=width, dark=dark)
                look(browser)
            steer(browser)
            assert browser.value("document.querySelector('#part-controls').textContent") == ""
            assert "next: plait train" in browser.value("document.querySelector('#part-head').textContent")
            assert browser.errors() == []
            watch.send_signal(signal.SIGINT)
            assert watch.communicate(timeout=WAIT_S) == ("", "")
            assert watch.returncode == 130
            browser.wait("!document.querySelector('#lost').hidden")
        assert job.wait(WAIT_S) == 130


def look(browser: Browser) -> None:
    """The page is filled and goes on; what is zoomed and typed stays."""
    steps = "parseInt(document.querySelector('#part-summary dd').textContent)"
    browser.wait("document.querySelector('#timeline canvas') && document.querySelector('polyline')")
    browser.value("document.querySelector('[name=workers]').value = 3")
    browser.click("#timeline [name=closer]")
    browser.wait("document.querySelector('#timeline').view().from > 0")
    seen, done = browser.value("document.querySelector('#timeline').view()"), browser.value(steps)
    browser.wait(f"{steps} > {done} + 1")
    assert browser.value("document.querySelector('#timeline').view()") == seen
    assert browser.value("document.querySelector('[name=workers]').value") == "3"
    browser.click("#timeline [name=all]")
    assert browser.value("document.querySelector('#part-head .state').textContent") == "running"
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")


def steer(browser: Browser) -> None:
    browser.click("[data-action=resize]")
    browser.wait("document.querySelector('dialog').open")
    assert "Go on with 3 workers in t-001?" in browser.value("document.querySelector('dialog').textContent")
    browser.click("dialog [name=yes]")
    browser.wait("document.querySelector('#answer').textContent.includes('3 wanted')")
    browser.wait("document.querySelector('#part-changes').textContent.includes('3 workers')", WAIT_S)
    browser.click("[data-action=stop]")
    browser.click("dialog [name=no]")
    assert browser.value("document.querySelector('#answer').textContent.includes('3 wanted')")
    browser.click("[data-action=stop]")
    browser.click("dialog [name=yes]")
    browser.wait("document.querySelector('#answer').textContent.includes('asked to stop')")
    browser.wait("document.querySelector('#part-head .state').textContent === 'stopped'", WAIT_S)
