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
from plait.core.events import Event, EventLine, Recorded, read_lines
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
    """All events of a run by time: `ops` from `operations`, and `others`, whose kinds are not declared."""

    events: tuple[Recorded, ...]
    ops: OpArrays
    others: tuple[EventLine, ...] = ()


def read_run(folder: Path) -> RunRecorded:
    """The events in the run folder `folder`; empty if there are none."""
    recorded: list[Recorded] = []
    operations: dict[int, _OpLists] = {}
    others: list[EventLine] = []
    kinds, of_pipeline = Event.kinds, Operations.kind()
    for path in sorted(folder.glob("events/rank*.jsonl")):
        for line in read_lines(path):
            if line.kind == of_pipeline:
                operations.setdefault(line.rank, _OpLists()).add(line)
            elif line.kind in kinds:
                recorded.append(line.decoded())
            else:
                others.append(line)
    recorded.sort(key=lambda each: each.t)
    ops = join_operations(lists.arrays(worker, str(folder)) for worker, lists in operations.items())
    return RunRecorded(tuple(recorded), ops, tuple(others))


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
