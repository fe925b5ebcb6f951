"""Lines out of pieces: however long they are, and whether or not they ever end."""

from __future__ import annotations

import time

import pytest

from plait.launcher.workers.worker_output import LineBuffer, visible_text


def test_lines_are_whole_however_they_come():
    lines = LineBuffer()
    taken = [lines.take(piece) for piece in (b"a", b"b\nc\n\nd", b"", b"e", b"\n", b"f")]
    assert taken == [[], [b"ab", b"c", b""], [], [], [b"de"], []]
    assert (lines.rest(), lines.rest()) == ([b"f"], [])


def test_a_line_that_does_not_end_costs_no_more_than_its_length():
    """Copied anew with each piece it would take 64 GB of copies."""
    lines, piece = LineBuffer(), b"x" * 16_384
    started = time.process_time()
    assert not any(lines.take(piece) for _ in range(3000))
    assert lines.take(b"\n") == [piece * 3000]
    assert time.process_time() - started < 3


def test_a_line_that_is_too_long_comes_in_parts():
    lines = LineBuffer(longest=10)
    taken = [lines.take(b"1234") for _ in range(4)]
    assert taken == [[], [], [b"123412341234"], []]
    assert lines.take(b"56\n7") == [b"123456"]
    assert lines.rest() == [b"7"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", "plain"),
        (b"ends as on Windows\r", "ends as on Windows"),
        (b"  0%\r 50%\r100% done\r", "100% done"),
        (b"\r\r", ""),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_progress_bar_is_shown_as_on_a_terminal(line: bytes, shown: str):
    assert visible_text(line) == shown
