"""Runs of workers that average weights, in small worlds without a launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.schema.settings import DataSettings, SyncSettings, TrainSettings
from support.averaging import job_store
from support.training import train_rank, unverified_job
from support.world import run_ranks


def settings_of(sync: str, options: dict[str, Any] | None = None, **changes: Any) -> TrainSettings:
    values = {"steps": 30, "precision": "float32", "data": DataSettings("digits", 48), **changes}
    return unverified_job(sync=SyncSettings(sync, options or {}), **values)


def run_sync(workers: int, settings: TrainSettings, folder: Path, **more: Any) -> list[Any]:
    with job_store() as address:
        return run_ranks(workers, train_rank, settings, folder, address=address, **more)
