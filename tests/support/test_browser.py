"""The browser that tests of pages use: what it says of a small page."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.browser import Browser, BrowserError

PAGE = """<!doctype html><meta name="viewport" content="width=device-width">
<button onclick="document.title = 'clicked'">go</button><script>console.error("broken")</script>"""


def test_the_browser_clicks_waits_and_reads_the_console_on_a_phone_in_dark_mode(
    browser: Browser, tmp_path: Path
):
    page = tmp_path / "page.html"
    page.write_text(PAGE)
    browser.open(page.as_uri(), width=390, dark=True)
    assert browser.value("[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [390, True]
    browser.click("button")
    browser.wait("document.title === 'clicked'")
    assert [line.rpartition(" ")[2] for line in browser.errors()] == ['"broken"']
    assert browser.errors() == []
    with pytest.raises(BrowserError, match=r"not true within 0.1 s: false; errors: \[\]"):
        browser.wait("false", wait_s=0.1)
