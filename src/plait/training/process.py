"""How each process of a job begins: its request, its device, and the process group of all workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from plait.core.codec import decode
from plait.core.errors import JobError
from plait.core.logs import show_logs
from plait.launch.messages import RunRequest
from plait.launch.worker_process import Worker
from plait.schema.settings import TrainSettings
from plait.training.optimizers.eager import use_eager_optimizers

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class TrainRequest(RunRequest):
    """A training run, as its workers receive it."""

    settings: TrainSettings


def begin_process(kind: type[R], order: Mapping[str, Any]) -> R:
    """Prepare this process for training; returns `order` decoded as a request of that kind."""
    show_logs()
    use_eager_optimizers()
    return decode(kind, order, "order")


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this worker; workers of one host take its GPUs in turn."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise JobError("device: found 'cuda', but torch sees no GPU here; use device: cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def use_device(wanted: str, worker: Worker) -> torch.device:
    """The device of `worker`, set as torch's current device."""
    device = choose_device(wanted, worker.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join_workers(worker: Worker, device: torch.device) -> None:
    """Create the process group of all workers; all call it together.

    Its backend is NCCL where every worker has a GPU to itself, else gloo, which goes through the host.
    """
    workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_gpu = device.type == "cuda" and workers_here <= torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    worker.store.set(f"plait/backend/{worker.rank}", backend)
    backends = {worker.store.get(f"plait/backend/{rank}").decode() for rank in range(worker.world_size)}
    worker.join(backend if len(backends) == 1 else "gloo")
