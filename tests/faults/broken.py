"""Models, data and optimizers of users' own that go wrong at some point of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from plait.core.errors import DataError
from plait.training import checkpoint


class Samples(torch.utils.data.Dataset[Any]):
    """Random points; the one with number `broken` cannot be read once a step-6 checkpoint is in `watched`."""

    def __init__(self, count: int, broken: int | None = None, watched: str | None = None) -> None:
        self.points = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
        self.broken = broken
        self.watched = watched

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number == self.broken and any(Path(self.watched or "").glob("*/checkpoints/step-*6")):
            raise DataError(f"img_{number}.png: cannot be decoded (image file is truncated)")
        return self.points[number], self.points[number].sum()[None]


def samples(split: str, **options: Any) -> Samples:
    return Samples(32 if split == "train" else 8, **options)


def line(width: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))


def no_graphs(hosts: list[str]) -> list[dict[str, Any]]:
    raise ValueError("no graphs today")


def slow_to_save(split: str, seconds: float) -> Samples:
    """Data whose import makes the last checkpoint take long to write."""

    def save(tensors: Any, path: Any) -> None:
        if "step-000000012" in str(path):
            Path(os.environ["PLAIT_SAVING"]).touch()
            time.sleep(seconds)
        save_file(tensors, path)

    checkpoint.save_file = save
    return samples(split)
