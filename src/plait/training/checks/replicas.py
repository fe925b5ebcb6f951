"""Finds state of a model that workers with the same layers would not share.

Workers see different samples. They average running statistics; but what forward writes for single samples
into a buffer, or keeps in Python, would be each worker's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from plait.core.errors import JobError
from plait.data.call_model import forward
from plait.pipeline.named_state import has_extra_state
from plait.pipeline.verify.row_buffers import FEWEST, describe_rows, own_buffers
from plait.schema.settings import TrainSettings
from plait.training.components import Components
from plait.training.run import Run
from plait.verification import same_random_numbers
from plait.verification.python_state import changed_by, unchanged_state


def check_no_rows(components: Components, settings: TrainSettings) -> None:
    """Refuse a model whose forward writes a buffer for single samples, of which a worker has only some."""
    if names := list(own_buffers(components.model)):
        inputs, _ = components.examples(FEWEST + 1, settings.seed)
        if words := describe_rows(components.model, inputs, names):
            raise JobError(f"model: {words}")


def check_kept(run: Run) -> None:
    """Refuse a model with state that a worker which joins, or takes a layer over, would not have.

    That is what forwards keep in Python, and of layers that move also what `get_extra_state` gives.
    """
    components, settings = run.components, run.settings
    moves = settings.pipeline is not None and settings.pipeline.graph is not None
    if not run.worker.memberships.can_grow and not moves:
        return
    key = "parallel.elastic" if run.worker.memberships.can_grow else "adapt"
    if settings.pipeline is not None and has_extra_state(components.model):
        raise JobError(
            f"{key}: a module of {settings.model.factory} has get_extra_state, which does not move between "
            f"workers with its layer; leave {key} out, or keep that state in buffers"
        )
    if (
        components.local_tensors is None
        and not components.train_set.is_stream
        and settings.verify.start != "off"
    ):
        inputs, _ = components.examples(2, settings.seed)
        if shown := find_kept(components.model, inputs):
            raise JobError(
                f"{key}: forward of {settings.model.factory} changes {shown}, which a worker that joins, or "
                f"takes a layer over, would not have; keep it in a buffer, or leave {key} out"
            )


def find_kept(model: nn.Module, inputs: Any) -> str:
    """What two forwards in a row change in Python, one after the other, as people know it; else nothing."""
    try:
        with same_random_numbers(0), unchanged_state({"": model}), torch.no_grad():
            copied = copy.deepcopy(model)
            forward(copied, inputs)
            names = changed_by(lambda: forward(copied, inputs), {"": copied})
    except Exception:  # a model that cannot be copied, or takes no such batch
        return ""
    return next((f"{shown} of {path}" if path else shown for path, shown in names), "")
