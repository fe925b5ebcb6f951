"""TensorBoard scalars of a sweep: a folder for each trial, so that their curves lie over one another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.training.metrics import open_board

# Each open one has a file and a thread.
MOST_OPEN = 32


class TrialBoards:
    """Writes scalars below `folder`, those of trial 3 in `trial-0003`; without a folder, none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._open: dict[int, Any] = {}

    def add(self, trial: int, step: int, scalars: Mapping[str, float | None]) -> None:
        """Write the scalars of a trial at a step by name; those that are not numbers are left out."""
        if self._folder is None:
            return
        board = self._open.pop(trial, None) or open_board(self._folder / f"trial-{trial:04d}")
        self._open[trial] = board
        for name, value in scalars.items():
            if value is not None and math.isfinite(value):
                board.add_scalar(name, value, step)
        for oldest in list(self._open)[:-MOST_OPEN]:
            # Should it go on, it does so in a further file of its folder.
            self._open.pop(oldest).close()

    def close(self) -> None:
        for board in self._open.values():
            board.close()
        self._open.clear()
