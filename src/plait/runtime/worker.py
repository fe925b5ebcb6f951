"""What a worker process runs: build the parts of the run and train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.cluster.worker import Worker
from plait.core.codec import decode
from plait.core.logs import show_logs
from plait.runtime import build
from plait.runtime.folder import RunFolder
from plait.runtime.settings import TrainSettings
from plait.runtime.trainer import Trainer


def check_order(order: dict[str, Any]) -> None:
    """Refuse settings that cannot run, before any worker starts; each host's agent calls it."""
    build.check(decode(TrainSettings, order["settings"], "settings"))


def train(worker: Worker, order: dict[str, Any]) -> dict[str, Any]:
    """Be one worker of a training run; rank 0's answer is the run's result."""
    show_logs()
    settings = decode(TrainSettings, order["settings"], "settings")
    device = build.choose_device(settings.device, worker.local_rank)
    if worker.world_size > 1:
        worker.join(build.choose_backend(device))
    parts = build.build(settings, device)
    trainer = Trainer(worker, settings, parts, RunFolder(Path(order["folder"])))
    return trainer.run(resume=order["resume"])
