"""Callbacks and metrics of a user's, as jobs of tests name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.callbacks import EndRecord, EvaluationRecord, StartRecord, StepRecord

FILE = "told.jsonl"


class Told:
    """Writes what it is told to a file in the folder of the run, once it has ended."""

    def __init__(self) -> None:
        self._told: list[Any] = []
        self._file = Path()

    def on_start(self, record: StartRecord) -> None:
        self._file = record.folder / FILE
        self._told.append(["start", record.step, record.trial])

    def on_step(self, record: StepRecord) -> None:
        self._told.append(["step", record.step, record.loss])

    def on_evaluate(self, record: EvaluationRecord) -> None:
        self._told.append(["evaluate", record.step, dict(record.metrics)])

    def on_end(self, record: EndRecord) -> None:
        self._told.append(["end", record.step, record.reason])
        with self._file.open("a") as file:
            file.write(json.dumps(self._told) + "\n")
        self._told = []


def told(folder: Path) -> list[list[Any]]:
    """What the callbacks of runs in a folder were told, each from its start to its end."""
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def ranked(output: Tensor, target: Tensor) -> Tensor:
    """A number over all samples that depends on their order, and on more than the sum over batches."""
    chosen = output.gather(1, target[:, None]).squeeze(1)
    return (chosen.sort().values * chosen).mean()


class Farthest:
    """The largest logit of all samples and the number of batches' last rows, as torchmetrics would count."""

    higher_is_better = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.largest = scale, 0.0

    def reset(self) -> None:
        self.largest = 0.0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.largest = max(self.largest, self.scale * output.max().item())

    def compute(self) -> float:
        return self.largest
