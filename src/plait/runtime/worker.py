"""What a worker process runs: build the parts of the run and train them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.core.codec import decode
from plait.core.errors import PlaitError
from plait.core.logs import show_logs
from plait.launch.run_dir import RunFolder
from plait.launch.worker import Worker
from plait.runtime import build
from plait.runtime import checkpoint as checkpoints
from plait.runtime.build import Parts
from plait.runtime.eager_optimizers import use_eager_optimizers
from plait.runtime.own_pace import OwnPaceTrainer
from plait.runtime.trainer import Trainer
from plait.schema.settings import SyncSettings, TrainSettings
from plait.schema.sync_options import TOLERANT


def check_order(order: dict[str, Any]) -> None:
    """Refuse settings that cannot run, before any worker starts; each host's agent calls it."""
    use_eager_optimizers()
    build.check(decode(TrainSettings, order["settings"], "settings"))


def train(worker: Worker, order: dict[str, Any]) -> dict[str, Any]:
    """Be one worker of a training run; rank 0's answer is the run's result."""
    show_logs()
    use_eager_optimizers()
    settings = decode(TrainSettings, order["settings"], "settings")
    device = build.choose_device(settings.device, worker.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if worker.world_size > 1 or settings.pipeline is not None:
        worker.join(build.agree_on_backend(worker, build.choose_backend(device)))
    folder = RunFolder(Path(order["folder"]))
    parts = build.build(settings, device, pieces=build.find_pieces(settings, device))
    trainer = make_trainer(worker, settings, parts, folder)
    result = trainer.run(resume=order["resume"])
    # Where others may be gone, its end could wait for them.
    if dist.is_initialized() and settings.sync.kind not in TOLERANT:
        dist.destroy_process_group()
    if result.get("reason") == "diverged":
        raise DivergedError(result["step"], checkpoints.list_checkpoints(folder.checkpoints))
    return result


class DivergedError(PlaitError):
    """The loss is no number any more."""

    def __init__(self, step: int, kept: Sequence[Path]) -> None:
        where = f"the newest checkpoint is {kept[0]}" if kept else "there is no checkpoint from before"
        super().__init__(
            f"the run has diverged: the loss is not a number at step {step}; {where}. Try a smaller learning "
            f"rate, warm-up or clip_norm; stop_on_nan: false lets such a run go on"
        )


def make_trainer(worker: Worker, settings: TrainSettings, parts: Parts, folder: RunFolder) -> Trainer:
    """The trainer that the settings ask for; all workers make one together."""
    if settings.pipeline is None and (worker.world_size == 1 or settings.sync.kind == "all-reduce"):
        return Trainer(worker, settings, parts, folder)
    hosts = worker.hosts
    if settings.pipeline is None:
        return _with_sync(worker, settings, parts, folder, hosts)
    return _with_stages(worker, settings, parts, folder, hosts)


def _with_stages(
    worker: Worker, settings: TrainSettings, parts: Parts, folder: RunFolder, hosts: Sequence[str]
) -> Trainer:
    """A trainer for workers that hold stages of the model."""
    # Slow to import, with all that tracing needs.
    from plait.runtime.column_trainer import FollowerTrainer, HeadTrainer
    from plait.runtime.columns import columns_of
    from plait.runtime.pipeline_trainer import PipelineTrainer, check_pipeline

    if settings.sync.kind == "all-reduce":
        return PipelineTrainer(worker, settings, parts, folder, hosts)
    arrangement = check_pipeline(settings, worker.world_size)
    heads = [column.layout.worker(0, 0) for column in columns_of(arrangement)]
    trainer = HeadTrainer if worker.rank in heads else FollowerTrainer
    return trainer(worker, settings, parts, folder, hosts, arrangement)


def _with_sync(
    worker: Worker, settings: TrainSettings, parts: Parts, folder: RunFolder, hosts: Sequence[str]
) -> Trainer:
    """A trainer for workers that may be unlike, with the sync that the job names or measurements choose."""
    if settings.sync.kind != "auto":
        return OwnPaceTrainer(worker, settings, parts, folder, hosts)
    from plait.runtime.auto_sync import choose_sync  # imports the profiler

    chosen = choose_sync(worker, settings, parts)
    settings = replace(settings, sync=SyncSettings(chosen.sync))
    trainer = (
        Trainer(worker, settings, parts, folder)
        if chosen.sync == "all-reduce"
        else OwnPaceTrainer(worker, settings, parts, folder, hosts)
    )
    trainer.recorder.note(chosen)
    return trainer
