"""The events of all workers of a run, finished or going on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.errors import ArtefactError
from plait.core.events import Event, EventLine, GrowingRecord, Recorded
from plait.core.run_events import Messages, Operations
from plait.report.arrays import EventColumns, MessageArrays, OpArrays

_OPERATIONS, _MESSAGES = Operations.kind(), Messages.kind()


@dataclass(frozen=True)
class RunRecorded:
    """All events of a run by time: `ops` and `messages` of a pipeline, and `others` of undeclared kinds.

    `unknown` says what is wrong with each event whose fields are not those of its kind: another version of
    Plait may have written it.
    """

    events: tuple[Recorded, ...]
    ops: OpArrays
    messages: MessageArrays
    others: tuple[EventLine, ...] = ()
    unknown: tuple[str, ...] = ()


def read_run(folder: Path) -> RunRecorded:
    """The events in the run folder `folder`; empty if there are none."""
    reader = RunReader(folder)
    reader.read_new()
    return reader.recorded()


class RunReader:
    """Reads the events of a run that may be going on: each call of `read_new` reads only what was added.

    `begun` counts how often it was read from the beginning.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.begun = 0
        self._start()

    def _start(self) -> None:
        self.begun += 1
        self._files: dict[Path, GrowingRecord] = {}
        self._events: list[Recorded] = []
        self._operations: dict[int, EventColumns[OpArrays]] = {}
        self._messages: dict[int, EventColumns[MessageArrays]] = {}
        self._others: list[EventLine] = []
        self._unknown: list[str] = []
        self.last_t = 0.0

    def read_new(self) -> bool:
        """Read the events since the last call; whether there were any.

        A record that was replaced, by another run of the same name, is read from its beginning.
        """
        is_new = any(record.was_replaced() for record in self._files.values())
        if is_new:
            self._start()
        for path in _records(self._folder):
            for line in self._files.setdefault(path, GrowingRecord(path)).new_lines():
                is_new = True
                self._add(line)
        return is_new

    def _add(self, line: EventLine) -> None:
        self.last_t = max(self.last_t, line.t)
        if line.kind == _OPERATIONS:
            expected = "operations, each with a letter, stage, microbatch, start and end"
            _collect(self._operations.setdefault(line.rank, EventColumns(OpArrays)), line, expected)
        elif line.kind == _MESSAGES:
            expected = "messages, each with a way, peer, bytes, start and end"
            _collect(self._messages.setdefault(line.rank, EventColumns(MessageArrays)), line, expected)
        elif line.kind not in Event.kinds:
            self._others.append(line)
        else:
            try:
                self._events.append(line.decoded())
            except ArtefactError as error:
                self._unknown.append(str(error))

    def recorded(self) -> RunRecorded:
        """All events read so far."""
        self._events.sort(key=lambda each: each.t)
        return RunRecorded(
            tuple(self._events),
            OpArrays.joined(columns.arrays(worker) for worker, columns in self._operations.items()),
            MessageArrays.joined(columns.arrays(worker) for worker, columns in self._messages.items()),
            tuple(self._others),
            tuple(self._unknown),
        )


def _collect(columns: EventColumns[Any], line: EventLine, expected: str) -> None:
    try:
        columns.add(line.fields)
    except (KeyError, ValueError, TypeError, OverflowError):
        raise ArtefactError(f"{line.where}: expected {expected}") from None


def _records(folder: Path) -> list[Path]:
    """The records of the workers; none without a folder for them, but OSError if it cannot be read.

    To open what is no file, such as a pipe, would wait for its writer.
    """
    try:
        paths = (folder / "events").iterdir()
        return sorted(path for path in paths if path.match("rank*.jsonl") and path.is_file())
    except FileNotFoundError:
        return []
