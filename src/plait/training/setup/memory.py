"""Whether a worker has the memory for a whole model, and the model on the meta device where it has not."""

from __future__ import annotations

import logging
import os
import resource

import psutil
import torch

from plait.pipeline.cutting.meta_device import LocalTensors, NotInPiecesError
from plait.pipeline.named_state import has_extra_state
from plait.schema.settings import TrainSettings
from plait.training.setup.model import build_model
from plait.training.setup.precision import dtype_of

# A worker that builds the whole model must have room for its weights, a copy on the way to the device, and
# an optimizer's state of a checkpoint.
WHOLE_COPIES = 4
log = logging.getLogger(__name__)


def find_local_tensors(settings: TrainSettings, device: torch.device) -> LocalTensors | None:
    """The model on the meta device, where a pipeline's worker cannot hold all of it; else None."""
    if not settings.in_stages or settings.sync.kind != "all-reduce":
        return None
    try:
        local_tensors = make_local_tensors(settings, device)
    except NotInPiecesError as failure:
        log.info("%s; every worker builds it whole and keeps its stages", failure)
        return None
    return local_tensors if local_tensors.weight_bytes() * WHOLE_COPIES > free_bytes(device) else None


def has_room_for_whole(model: torch.nn.Module, device: torch.device) -> bool:
    """Whether this worker has memory for training a second copy of the whole model."""
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return whole * WHOLE_COPIES < free_bytes(device)


def make_local_tensors(settings: TrainSettings, device: torch.device) -> LocalTensors:
    """The model of the settings on the meta device."""
    local_tensors = LocalTensors(
        lambda: build_model(settings.model, settings.seed), dtype_of(settings), device
    )
    if has_extra_state(local_tensors.model):
        raise NotInPiecesError(
            "the model has extra state (get_extra_state), which cannot be split over workers"
        )
    return local_tensors


def free_bytes(device: torch.device) -> float:
    """The memory that this worker may use on `device`."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    # The workers of a host share its memory. In an elastic job more may join, up to a number that may be far
    # beyond the cores.
    most, now = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    free = psutil.virtual_memory().available / min(most, max(now, os.cpu_count() or 1))
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            used = psutil.Process().memory_info()
            free = min(free, limit - (used.data if kind == resource.RLIMIT_DATA else used.vms))
    return free
