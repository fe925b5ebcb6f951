"""The events of all workers of a run; the operations of a pipeline, which are many, as arrays."""

from __future__ import annotations

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
    operations: list[OpArrays] = []
    others: list[EventLine] = []
    for path in sorted(folder.glob("events/rank*.jsonl")):
        for line in read_lines(path):
            if line.kind == Operations.kind():
                operations.append(_as_arrays(line))
            elif line.kind in Event.kinds:
                recorded.append(line.decoded())
            else:
                others.append(line)
    recorded.sort(key=lambda each: each.t)
    return RunRecorded(tuple(recorded), join_operations(operations), tuple(others))


def join_operations(parts: Iterable[OpArrays]) -> OpArrays:
    """The operations of all `parts` by start."""
    columns = [np.concatenate(column) for column in zip(_NONE, *([*_columns(part)] for part in parts))]
    joined = OpArrays(*columns)
    return joined.take(np.argsort(joined.starts, kind="stable"))


def _columns(part: OpArrays) -> list[npt.NDArray[np.generic]]:
    return [getattr(part, each.name) for each in fields(part)]


_NONE = [np.zeros(0, np.int64)] * 4 + [np.zeros(0, np.float64)] * 2


def _as_arrays(line: EventLine) -> OpArrays:
    try:
        return arrays_of(line.rank, line.fields)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        raise ArtefactError(
            f"{line.where}: expected operations with one letter, stage, microbatch, start and end each"
        ) from None


def arrays_of(worker: int, values: Mapping[str, Any]) -> OpArrays:
    """The fields of an `operations` event of a worker as arrays; ValueError if they have unlike lengths."""
    letters = np.frombuffer(values["letters"].encode("ascii"), np.uint8).astype(np.int64)
    stages, microbatches = (np.array(values[name], np.int64) for name in ("stages", "microbatches"))
    starts, ends = (np.array(values[name], np.float64) for name in ("starts", "ends"))
    shapes = {each.shape for each in (letters, stages, microbatches, starts, ends)}
    if len(shapes) > 1 or not np.isfinite(starts).all() or not np.isfinite(ends).all():
        raise ValueError("unlike lengths")
    return OpArrays(np.full(len(letters), worker), letters, stages, microbatches, starts, ends)
