"""Runs of workers that average weights, in small worlds without a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.launch.run_dir import RunDir
from plait.schema.results import RunResult
from plait.schema.settings import DataSettings, SyncSettings, TrainSettings
from plait.training import components
from plait.training.engines.decentralized import DecentralizedEngine, WholeModel
from plait.training.loop import Loop
from plait.training.run import Run
from support.averaging import job_store, open_store
from support.training import TestWorker, digits_job
from support.world import run_ranks


class StoreWorker(TestWorker):
    """A worker with the job's store and no launcher around it."""

    def __init__(self, rank: int, size: int, address: str, stop_file: Path | None) -> None:
        super().__init__(rank, size, stop_file)
        self.store = open_store(address, rank)
        self.timeout_s = 20.0

    def tolerate_losses(self) -> None:
        """Nobody ends the others here."""

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Nobody waits for them here."""


def train_at_own_pace(
    rank: int, address: str, settings: TrainSettings, folder: Path, resume: bool = False, stop_at: int = 0
) -> tuple[RunResult, dict[str, Any]]:
    size = dist.get_world_size()
    worker = StoreWorker(rank, size, address, folder / "stop" if stop_at else None)
    parts = components.build(settings, torch.device("cpu"))
    run = Run(worker, settings, parts, RunDir(folder))  # type: ignore[arg-type]
    if stop_at and rank == 1:
        run.metrics.step = lambda step, *_: (folder / "stop").touch() if step >= stop_at else None  # type: ignore[method-assign]
    result = Loop(run, DecentralizedEngine(run, WholeModel(run, ["a"] * size))).train(resume)
    return result, {name: value.tolist() for name, value in parts.model.state_dict().items()}


def settings_of(sync: str, options: dict[str, Any] | None = None, **changes: Any) -> TrainSettings:
    values = {"steps": 30, "precision": "float32", "data": DataSettings("digits", 48), **changes}
    return digits_job(sync=SyncSettings(sync, options or {}), **values)


def run_sync(workers: int, settings: TrainSettings, folder: Path, **more: Any) -> list[Any]:
    with job_store() as address:
        return run_ranks(workers, train_at_own_pace, address, settings, folder, **more)
