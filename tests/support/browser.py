"""A real Chromium for tests of pages, driven through chromedriver: WebDriver's JSON over HTTP, and DevTools.

A test takes the fixture `browser`, which is skipped with the reason where Chromium or its driver is missing:

    browser.open(page.as_uri(), width=390, dark=True)
    browser.wait("document.querySelectorAll('tr').length > 3")
    assert browser.value("document.title") == "digits-001"
    assert browser.errors() == []
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S, REQUEST_S, WAIT_S = 60.0, 60.0, 30.0
_PROGRAMS = {"driver": ("chromedriver",), "browser": ("chromium", "chromium-browser", "google-chrome")}
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)


def missing_for_browser() -> str | None:
    """Why there is no browser here, in words; None if there is one."""
    for what, names in _PROGRAMS.items():
        if not any(map(shutil.which, names)):
            return f"no {what} to look at pages with: expected one of {', '.join(names)}"
    return None


class BrowserError(Exception):
    """What the driver answered instead of a result."""


class Browser:
    """One window of Chromium; `address` is that of its session at chromedriver."""

    def __init__(self, address: str) -> None:
        self._address = address

    def open(
        self, address: str, width: int = 1280, height: int = 900, dark: bool = False, ratio: int = 1
    ) -> None:
        """Load a page (`http://...` or `path.as_uri()`) on a screen of this size; forgets earlier errors."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=width < 600,
        )
        self.devtools(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.errors()
        # The driver may answer before the page is there, as it does on a busy machine.
        self.value("window.wasLeft = true")
        self._request("POST", "url", {"url": address})
        self.wait("!window.wasLeft && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise's value once it has one."""
        found = self.devtools(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str, wait_s: float = WAIT_S) -> None:
        """Return once the JavaScript expression `condition` is true in the page."""
        deadline = time.monotonic() + wait_s
        while not self.value(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise BrowserError(f"not true within {wait_s:g} s: {condition}; errors: {self.errors()}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click on the middle of an element as a person would, after scrolling to it."""
        self.mouse("mousePressed", *self._middle(selector))
        self.mouse("mouseReleased", *self._middle(selector))

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        self.mouse("mouseMoved", *self._middle(selector))

    def drag(self, selector: str, by: int, steps: int = 8) -> None:
        """Press the mouse in the middle of an element, move it sideways by `by` pixels, and release it."""
        x, y = self._middle(selector)
        self.mouse("mousePressed", x, y)
        for step in range(1, steps + 1):
            self.mouse("mouseMoved", x + by * step / steps, y, buttons=1)
        self.mouse("mouseReleased", x + by, y)

    def wheel(self, selector: str, by: int, with_ctrl: bool = False) -> None:
        """Turn the wheel over the middle of an element."""
        x, y = self._middle(selector)
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=by, modifiers=2 if with_ctrl else 0)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event of DevTools at a point of the window: `mouseMoved`, `mousePressed`, ..."""
        button = {} if kind in ("mouseMoved", "mouseWheel") else {"button": "left", "clickCount": 1}
        self.devtools("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button, **more)

    def _middle(self, selector: str) -> tuple[float, float]:
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        if box is None:
            raise BrowserError(f"{selector}: no such element in the page")
        return box[0], box[1]

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def errors(self) -> list[str]:
        """What the console says since the last call that is an error."""
        lines = self._request("POST", "se/log", {"type": "browser"})
        return [f"{line['level']}: {line['message']}" for line in lines]

    def devtools(self, method: str, **parameters: Any) -> Any:
        """The answer to a command of the DevTools protocol, as `Performance.getMetrics`."""
        return self._request("POST", "goog/cdp/execute", {"cmd": method, "params": parameters})

    def _request(self, method: str, path: str, content: dict[str, Any]) -> Any:
        return _request(method, f"{self._address}/{path}", content)


def _request(method: str, address: str, content: dict[str, Any] | None = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    # The driver is on this machine, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=REQUEST_S) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        value = json.load(error)["value"]
        raise BrowserError(f"{_path_of(address)}: {value['error']}: {value['message']}") from None


def _path_of(address: str) -> str:
    """The part of the address of a request that says what was asked for."""
    return address.rpartition("/session/")[2].partition("/")[2] or "session"


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A Chromium of its own, with a profile of its own; both end with the block."""
    driver, browser = (next(filter(None, map(shutil.which, names))) for names in _PROGRAMS.values())
    with tempfile.TemporaryDirectory(prefix="plait-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            root = f"http://127.0.0.1:{_port(process)}"
            options = {"binary": browser, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "SEVERE"}}
            session = _request("POST", f"{root}/session", {"capabilities": {"alwaysMatch": wanted}})
            address = f"{root}/session/{session['sessionId']}"
            try:
                yield Browser(address)
            finally:
                _request("DELETE", address)
        finally:
            process.terminate()
            process.wait(START_S)
            assert process.stdout is not None
            process.stdout.close()


def _port(process: subprocess.Popen[str]) -> int:
    """The port that the driver says it has taken."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"started successfully on port (\d+)", line):
            return int(match[1])
    raise BrowserError(f"chromedriver ended with status {process.wait(START_S)} and named no port")
