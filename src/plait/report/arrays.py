"""The operations and messages of a pipeline, which are many, as arrays with one entry for each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# How the fields of events are collected: text as characters, times as floats, others as whole numbers.
_CODES = {"letters": "B", "ways": "B", "starts": "d", "ends": "d"}


@dataclass(frozen=True)
class OpArrays:
    """Operations of all workers by start.

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

    def take(self, chosen: npt.NDArray[np.bool_] | Ints | slice) -> Self:
        """The entries that a mask, indices or a slice choose."""
        return type(self)(*(getattr(self, each.name)[chosen] for each in fields(self)))

    def shifted(self, seconds: float) -> Self:
        """The same, `seconds` later."""
        return replace(self, starts=self.starts + seconds, ends=self.ends + seconds)

    def lists(self) -> list[list[Any]]:
        """Its arrays as lists, in the order of the fields; letters are still codes."""
        return [getattr(self, each.name).tolist() for each in fields(self)]

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The entries of all `parts` by start."""
        parts = [EventColumns(cls).arrays(0), *parts]  # none of them may have any
        whole = cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))
        return whole.take(np.argsort(whole.starts, kind="stable"))


@dataclass(frozen=True)
class MessageArrays(OpArrays):
    """Messages of all workers by start, with the letters, stages and microbatches of their operations.

    `ways` are character codes of s and r: whether the worker sent or received it.
    """

    ways: Ints
    peers: Ints
    peer_stages: Ints
    bytes: Ints


A = TypeVar("A", bound=OpArrays)


class EventColumns(Generic[A]):
    """Collects the fields of one worker's events: arrays of each event would take much longer."""

    def __init__(self, kind: type[A]) -> None:
        self._kind = kind
        names = [each.name for each in fields(kind) if each.name != "workers"]
        self._columns = {name: array(_CODES.get(name, "q")) for name in names}

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the fields of an event; LookupError, ValueError, TypeError or OverflowError if damaged."""
        added = {name: _column(column.typecode, values[name]) for name, column in self._columns.items()}
        if len({len(column) for column in added.values()}) != 1:
            raise ValueError("fields of different lengths")
        if not all(np.isfinite(added[name]).all() for name in ("starts", "ends")):
            raise ValueError("times that are not finite")
        for name, column in added.items():
            self._columns[name].extend(column)

    def arrays(self, worker: int) -> A:
        """What was collected so far."""
        columns: list[Any] = [
            np.array(column, np.float64 if column.typecode == "d" else np.int64)
            for column in self._columns.values()
        ]
        return self._kind(np.full(len(columns[0]), worker), *columns)


def _column(code: str, values: Any) -> array[Any]:
    if code != "B":
        return array(code, values)
    if not isinstance(values, str) or not (values.isalpha() or not values):
        raise ValueError("found something else than letters")
    return array(code, values.encode("ascii"))
