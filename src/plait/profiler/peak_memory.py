"""Peak allocated bytes between two moments, from the records of torch's profiler."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "plait.mark."


class Levels:
    """Marks moments, like a clock, while torch's profiler records each allocation on `device`.

    Bytes are relative to the start of the recording, and include workspaces inside operations.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type.upper()
        self._marks = itertools.count()
        self._moments: dict[str, int] = {}
        self._changes: list[tuple[int, int]] = []

    def mark(self) -> str:
        name = f"{_MARK}{next(self._marks)}"
        with record_function(name):
            return name

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record allocations in the block; `between` can be called afterwards."""
        with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            yield
        results = record.profiler.kineto_results if record.profiler is not None else None
        assert results is not None
        level = 0
        for event in sorted(results.events(), key=lambda event: event.start_ns()):
            if event.name().startswith(_MARK):
                self._moments[event.name()] = event.start_ns()
            elif event.name() == "[memory]" and event.device_type().name == self._kind:
                level += event.nbytes()
                self._changes.append((event.start_ns(), level))

    def between(self, start: Any, end: Any) -> float:
        """The peak of allocated bytes between two marks."""
        first = bisect.bisect_right(self._changes, (self._moments[start], 0))
        last = bisect.bisect_left(self._changes, (self._moments[end], 0))
        # Start from the level before the first change in the range.
        levels = [level for _, level in self._changes[max(0, first - 1) : last]]
        return float(max(levels, default=0))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the profiler's messages on the terminal."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
