"""The entry point of a worker process: build the components of the run and train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from plait.core.errors import PlaitError
from plait.data.call_model import compile_in_place
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.training import checkpoint as checkpoints
from plait.training.change.join_members import join_members
from plait.training.checks.data_fingerprints import look_at_data
from plait.training.checks.first_evaluation import try_evaluation
from plait.training.checks.plan_settings import check_pipeline
from plait.training.choose_engine import make_job_loop
from plait.training.components import build as build_components
from plait.training.components import check as check_settings
from plait.training.process import TrainRequest, begin_process, join_workers, use_device
from plait.training.setup.memory import find_local_tensors


def check_request(order: Mapping[str, Any]) -> None:
    """Refuse settings that cannot run, before any worker starts; each host's agent calls it."""
    request = begin_process(TrainRequest, order)
    settings = request.settings.as_run()
    check_settings(settings)
    if settings.in_stages:
        check_pipeline(settings, request.workers)


def train(worker: Worker, order: Mapping[str, Any]) -> dict[str, Any]:
    """Run one worker of a training run; rank 0 returns the result of the run."""
    request = begin_process(TrainRequest, order)
    settings, folder = request.settings.as_run(), RunDir(request.folder)
    device = use_device(settings.device, worker)
    if worker.memberships.can_change:
        join_members(worker, settings)
    elif worker.world_size > 1 or settings.in_stages:
        join_workers(worker, device)
    # Where layers may move, each worker makes the model whole, and keeps its own.
    local_tensors = None if worker.memberships.can_change else find_local_tensors(settings, device)
    components = build_components(settings, device, local_tensors=local_tensors)
    look_at_data(worker, (components.train_set, components.test_set), settings.seed)
    message = ""
    if worker.rank >= 0:  # those that join later go on with what works already
        message = try_evaluation(components, settings, worker.rank, worker.world_size)
    if settings.compile and not settings.in_stages:
        # Audits repeat steps with a model that is not compiled.
        compile_in_place(components.model, device, "compile")
    loop = make_job_loop(worker, settings, components, folder, request.resume)
    if message:
        loop.run.metrics.warn(message)
    try:
        result = loop.train(resume=request.resume)
    except BaseException:
        loop.run.metrics.fail()
        raise
    # Where others may be gone, its end could wait for them.
    if dist.is_initialized() and not worker.memberships.can_change:
        dist.destroy_process_group()
    if result is None:  # it followed another worker, which keeps the record
        return {}
    if loop.divergence.why is not None:
        raise DivergedError(loop.divergence.why, checkpoints.list_checkpoints(folder.checkpoints))
    return result.to_dict()


class DivergedError(PlaitError):
    """The loss or the weights are no numbers any more."""

    def __init__(self, message: str, kept: Sequence[Path]) -> None:
        where = f"the newest checkpoint is {kept[0]}" if kept else "there is no checkpoint from before"
        super().__init__(
            f"the run has diverged: {message}; {where}. Try a smaller learning rate, warm-up or clip_norm; "
            f"stop_on_nan: false lets such a run go on, without checkpoints until its state is finite again"
        )
