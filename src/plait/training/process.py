"""How each process of a job begins: its request, its device, and the process group of all workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from plait.api.world import choose_backend, choose_device
from plait.core.codec import decode
from plait.core.logs import show_logs
from plait.launcher.messages import RunRequest
from plait.launcher.worker_process import Worker
from plait.schema.settings import TrainSettings
from plait.training.optimizers.eager import use_eager_optimizers

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class TrainRequest(RunRequest):
    """A training run, as its workers receive it."""

    settings: TrainSettings


def begin_process(kind: type[R], order: Mapping[str, Any]) -> R:
    """Prepare this process for training, unless it is the user's; returns `order` as a request of `kind`."""
    if not order.get("in_process", False):
        show_logs()
        use_eager_optimizers()
    return decode(kind, order, "order")


def use_device(wanted: str, worker: Worker) -> torch.device:
    """The device of `worker`, set as torch's current device."""
    device = choose_device(wanted, worker.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join_workers(worker: Worker, device: torch.device) -> None:
    """Create the process group of all workers; all call it together."""
    worker.join(choose_backend(worker.rendezvous, device))
