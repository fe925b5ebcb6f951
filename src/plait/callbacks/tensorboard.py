"""Scalars for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from plait.callbacks.callback import PackagedCallback
from plait.callbacks.records import EndRecord, EvaluationRecord, StartRecord, StepRecord

# Writers of trials that are open at once: each has a file and a thread.
MOST_OPEN = 32


class TensorBoard(PackagedCallback):
    """Writes losses and metrics into `tensorboard/` of the run's folder, a trial's into a folder in it."""

    package = "tensorboard"
    # The callbacks of this process whose writers are open, the least recently used first.
    _open: ClassVar[dict[TensorBoard, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path()

    def on_start(self, record: StartRecord) -> None:
        folder = record.folder / "tensorboard"
        self._folder = folder if record.trial is None else folder / f"trial-{record.trial:04d}"

    def on_step(self, record: StepRecord) -> None:
        values = {"train/loss": record.loss, "train/lr": record.lr}
        if record.samples is not None and record.seconds:
            values["train/samples_per_s"] = record.samples / record.seconds
        self._add(values, record.step)

    def on_evaluate(self, record: EvaluationRecord) -> None:
        self._add({f"test/{name}": value for name, value in record.metrics.items()}, record.step)

    def on_end(self, record: EndRecord) -> None:
        if (writer := self._open.pop(self, None)) is not None:
            writer.close()

    def _add(self, values: Mapping[str, float | None], step: int) -> None:
        """Write the values that are numbers."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._open[self] = writer = self._open.pop(self, None) or SummaryWriter(str(self._folder))
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                writer.add_scalar(name, value, step)
        for oldest in list(self._open)[:-MOST_OPEN]:
            # Should it go on, it does so in a further file of its folder.
            self._open.pop(oldest).close()
