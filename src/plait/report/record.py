"""The events of all workers of a run; the operations of a pipeline, which are many, as arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.core.errors import ArtefactError
from plait.core.events import Event, EventLine, GrowingRecord, Recorded
from plait.core.run_events import Operations

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OpArrays:
    """Operations of all workers by start, with one entry in each array per operation.

    `letters` are character codes of F, B, I, W and U (docs/events.md); times are seconds since the epoch.
    """

    workers: Ints
    letters: Ints
    stages: Ints
    microbatches: Ints
    starts: Floats
    ends: Floats

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, chosen: npt.NDArray[np.bool_] | Ints | slice) -> OpArrays:
        """The operations that a mask, indices or a slice choose."""
        return OpArrays(*(getattr(self, each.name)[chosen] for each in fields(self)))


@dataclass(frozen=True)
class RunRecorded:
    """All events of a run by time: `ops` from `operations`, and `others`, whose kinds are not declared.

    `unknown` says what is wrong with each event whose fields are not those of its kind: another version of
    Plait may have written it.
    """

    events: tuple[Recorded, ...]
    ops: OpArrays
    others: tuple[EventLine, ...] = ()
    unknown: tuple[str, ...] = ()


def read_run(folder: Path) -> RunRecorded:
    """The events in the run folder `folder`; empty if there are none."""
    reader = RunReader(folder)
    reader.read_new()
    return reader.recorded()


class RunReader:
    """Reads the events of a run that may be going on: each call of `read_new` reads only what was added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start()

    def _start(self) -> None:
        self._files: dict[Path, GrowingRecord] = {}
        self._events: list[Recorded] = []
        self._operations: dict[int, _OpLists] = {}
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
            self._operations.setdefault(line.rank, _OpLists()).add(line)
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
        parts = [lists.arrays(worker, str(self._folder)) for worker, lists in self._operations.items()]
        return RunRecorded(
            tuple(self._events), join_operations(parts), tuple(self._others), tuple(self._unknown)
        )


def _records(folder: Path) -> list[Path]:
    """The records of the workers; none without a folder for them, but OSError if it cannot be read."""
    try:
        return sorted(path for path in (folder / "events").iterdir() if path.match("rank*.jsonl"))
    except FileNotFoundError:
        return []


class _OpLists:
    """Collects the `operations` events of one worker: arrays of each of them would take much longer."""

    def __init__(self) -> None:
        self._letters: list[str] = []
        self._lists: dict[str, array[Any]] = {name: array(code) for name, code in _LISTS.items()}

    def add(self, line: EventLine) -> None:
        try:
            letters, lists = line.fields["letters"], [line.fields[name] for name in _LISTS]
            if {len(each) for each in lists} != {len(letters)}:
                raise ValueError
            for name, values in zip(_LISTS, lists):
                self._lists[name].extend(values)
            self._letters.append(letters)
        except (KeyError, ValueError, TypeError, OverflowError):
            raise _damaged(line.where) from None

    def arrays(self, worker: int, where: str) -> OpArrays:
        try:
            return arrays_of(worker, {"letters": "".join(self._letters), **self._lists})
        except (ValueError, TypeError, OverflowError):
            raise _damaged(f"{where}: worker {worker}") from None


_OPERATIONS = Operations.kind()
_LISTS = {"stages": "q", "microbatches": "q", "starts": "d", "ends": "d"}


def _damaged(where: str) -> ArtefactError:
    return ArtefactError(
        f"{where}: expected operations, each with a letter, stage, microbatch, start and end"
    )


def join_operations(parts: Iterable[OpArrays]) -> OpArrays:
    """The operations of all `parts` by start."""
    columns = [np.concatenate(column) for column in zip(_NONE, *([*_columns(part)] for part in parts))]
    joined = OpArrays(*columns)
    return joined.take(np.argsort(joined.starts, kind="stable"))


def _columns(part: OpArrays) -> list[npt.NDArray[np.generic]]:
    return [getattr(part, each.name) for each in fields(part)]


_NONE = [np.zeros(0, np.int64)] * 4 + [np.zeros(0, np.float64)] * 2


def arrays_of(worker: int, values: Mapping[str, Any]) -> OpArrays:
    """The fields of an `operations` event of a worker as arrays."""
    letters = np.frombuffer(values["letters"].encode("ascii"), np.uint8).astype(np.int64)
    stages, microbatches = (np.array(values[name], np.int64) for name in ("stages", "microbatches"))
    starts, ends = (np.array(values[name], np.float64) for name in ("starts", "ends"))
    if not (np.isfinite(starts).all() and np.isfinite(ends).all()):
        raise ValueError("times that are not finite")
    return OpArrays(np.full(len(letters), worker), letters, stages, microbatches, starts, ends)
