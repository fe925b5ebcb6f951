"""The output of workers: splitting it into lines, and writing it to log files."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# With more unwritten output than this, further output is left out of the logs.
MOST_UNWRITTEN_BYTES = 64 << 20


class LineBuffer:
    """Splits a stream of bytes into lines; keeps an incomplete line until its end arrives.

    A line of more than `longest` bytes is returned in parts.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._chunks: list[bytes] = []
        self._bytes = 0

    def take(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        *ends, last = data.split(b"\n")
        lines = []
        for end in ends:
            self._keep(end)
            lines.append(self._join())
        self._keep(last)
        if self._longest is not None and self._bytes > self._longest:
            lines.append(self._join())
        return lines

    def rest(self) -> list[bytes]:
        """The incomplete last line, if any."""
        return [self._join()] if self._bytes else []

    def _keep(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._bytes += len(chunk)

    def _join(self) -> bytes:
        line = b"".join(self._chunks)
        self._chunks, self._bytes = [], 0
        return line


def visible_text(line: bytes) -> str:
    """The line as a terminal shows it: text after a carriage return overwrites the text before."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class LogWriter:
    """Appends to files in a separate thread, so a stalled disk does not block the caller."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        self._left_out = Counter[Path]()
        self._files: dict[Path, BinaryIO] = {}
        threading.Thread(target=self._work, name="plait-logs", daemon=True).start()

    def append(self, path: Path, data: bytes) -> None:
        """Append to the file, which is created if necessary; called by one thread."""
        with self._lock:
            if self._unwritten_bytes + len(data) > MOST_UNWRITTEN_BYTES:
                self._left_out[path] += len(data)
                return
            if left_out := self._left_out.pop(path, 0):
                data = f"[{left_out} bytes left out: the disk was too slow]\n".encode() + data
            self._unwritten_bytes += len(data)
        self._tasks.put(functools.partial(self._append, path, data))

    def close(self, path: Path) -> None:
        """Close the file after what was appended before."""
        self._tasks.put(functools.partial(self._close, path))

    def flush(self, seconds: float) -> None:
        """Wait until everything is written, for `seconds` at most."""
        reached = threading.Event()
        self._tasks.put(reached.set)
        reached.wait(seconds)

    def _work(self) -> None:
        while True:
            # A full disk: the lines are still displayed.
            with contextlib.suppress(OSError):
                self._tasks.get()()

    def _append(self, path: Path, data: bytes) -> None:
        try:
            if path not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path] = path.open("ab", buffering=0)
            self._files[path].write(data)
        finally:
            with self._lock:
                self._unwritten_bytes -= len(data)

    def _close(self, path: Path) -> None:
        if path in self._files:
            self._files.pop(path).close()
