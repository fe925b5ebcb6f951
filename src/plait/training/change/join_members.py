"""The process group of a run's members."""

from __future__ import annotations

from plait.adapt.members import BACKEND
from plait.launcher.worker_process import Worker
from plait.schema.settings import TrainSettings


def join_members(worker: Worker, settings: TrainSettings) -> None:
    """Create the process group of the members, if this worker is a member and the group is used."""
    averages = settings.sync.kind != "all-reduce" or bool(settings.adapt)
    if worker.world_size > 1 or (worker.rank >= 0 and (settings.pipeline is not None or averages)):
        worker.join(BACKEND)
