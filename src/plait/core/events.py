"""Typed events: the measurements of a run, one JSON object per line.

Each line holds `t` (seconds since the epoch), `rank`, `kind`, and the fields of that kind of event.
An event class derives from `Event`; its kind is its name in lower case. Packages declare the events they
record. docs/events.md documents them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError
from plait.core.files import writing
from plait.core.names import did_you_mean
from plait.core.shown import shown

FLUSH_S = 1.0
# The newest lines that are kept while the disk is full.
MOST_KEPT = 100_000
log = logging.getLogger(__name__)


@dataclass_transform(frozen_default=True)
class Event:
    """Base of all events. Subclasses become frozen dataclasses and are registered for `read`."""

    kinds: ClassVar[dict[str, type[Event]]] = {}
    # Whether it is written at once, so that a killed worker's record has it.
    is_urgent: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.kind()] = dataclass(frozen=True)(cls)

    @classmethod
    def kind(cls) -> str:
        name = cls.__name__
        return "".join("-" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


@dataclass(frozen=True)
class Recorded:
    """An event with its time and the rank of its worker."""

    t: float
    rank: int
    event: Event


class EventLog:
    """Appends the events of one worker to a file.

    Lines are buffered and written every second, after an urgent event and on close, each line whole or not
    at all. A full disk does not end the run: the newest lines are kept until they can be written, with one
    warning. Opening the file of a killed run first removes an incomplete last line. `on_event` is called with
    each event once it is recorded.
    """

    def __init__(self, path: Path, rank: int, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self._on_event = on_event
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_half_line(path)
            self._file = path.open("ab", buffering=0)
        self._path = path
        self._rank = rank
        # The first event is written at once.
        self._flushed = -math.inf
        self._kept: deque[bytes] = deque(maxlen=MOST_KEPT)
        self._has_warned = False

    def record(self, event: Event) -> None:
        line = {"t": round(time.time(), 6), "rank": self._rank, "kind": event.kind(), **encode(event)}
        self._kept.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        if event.is_urgent or time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()
        self._on_event(event)

    def flush(self) -> None:
        self._flushed = time.monotonic()
        if not self._kept:
            return
        lines = b"".join(self._kept)
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(lines)
            if written < len(lines):  # the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._kept.clear()
        except OSError as failure:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s: events cannot be written: %s", self._path, failure.strerror)

    def close(self) -> None:
        self.flush()
        self._file.close()


def _drop_half_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def read(path: Path) -> Iterator[Recorded]:
    """The events in `path`, oldest first; an incomplete last line is skipped."""
    for line in read_lines(path):
        if line.kind not in Event.kinds:
            hint = did_you_mean(line.kind, Event.kinds)
            raise ArtefactError(f"{line.where}: unknown kind of event {shown(line.kind)}{hint}")
        yield line.decoded()


@dataclass(frozen=True)
class EventLine:
    """One line of a record whose fields are not decoded yet; `where` is its file and number."""

    t: float
    rank: int
    kind: str
    fields: dict[str, Any]
    where: str

    def decoded(self) -> Recorded:
        """The event, with its fields checked; its kind must be known."""
        return Recorded(self.t, self.rank, decode(Event.kinds[self.kind], self.fields, self.where))


class GrowingRecord:
    """A record that may still be written to: `new_lines` has the whole lines since its last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._number = 0
        self._inode: int | None = None

    def was_replaced(self) -> bool:
        """Whether the file is another one now, or shorter than what was read."""
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return True
        return now.st_ino != (self._inode or now.st_ino) or now.st_size < self._offset

    def new_lines(self) -> Iterator[EventLine]:
        """The lines that have not been read yet; a damaged one is not read again."""
        with self._path.open("rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._number += 1
                yield _parse(line, f"{self._path}:{self._number}")


def read_lines(path: Path) -> Iterator[EventLine]:
    """The lines of a record, of whatever kind, oldest first; an incomplete last line is skipped."""
    return GrowingRecord(path).new_lines()


def _parse(line: bytes, where: str) -> EventLine:
    try:
        data: dict[str, Any] = json.loads(line.decode())
        t, rank, kind = float(data.pop("t")), int(data.pop("rank")), str(data.pop("kind"))
        if not math.isfinite(t):
            raise ValueError("a time that is not finite")
        return EventLine(t, rank, kind, data, where)
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
        text = shown(line[:100].decode(errors="replace").strip())
        raise ArtefactError(
            f"{where}: found {text}, expected an event; delete that line to read the rest"
        ) from None
