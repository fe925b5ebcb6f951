"""Fills in the tensors that each worker of a pipeline holds of a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.comm.collectives import broadcast_value
from plait.pipeline import named_state
from plait.pipeline.cutting.meta_device import LocalTensors
from plait.pipeline.layout import PipelineLayout
from plait.profiler.traced_model import TracedModel
from plait.training import checkpoint as checkpoints
from plait.training.components import Components

# The ranks that hold each parameter and buffer that a stage uses, by its first name.
Holders = Mapping[str, Sequence[int]]


def stages_by_name(traced: TracedModel, pipeline_layout: PipelineLayout) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter and buffer."""
    stages_of: dict[str, dict[int, None]] = {}
    for stage, ids in enumerate(pipeline_layout.stages):
        for layer in traced.select(ids):
            for name in (*layer.parameters, *layer.buffers):
                stages_of.setdefault(name, {})[stage] = None
    return {name: tuple(stages) for name, stages in stages_of.items()}


def names_by_stage(traced: TracedModel, pipeline_layout: PipelineLayout) -> Holders:
    """The ranks that hold each parameter and buffer of the stages."""
    stages_of = stages_by_name(traced, pipeline_layout)
    return {name: pipeline_layout.holders(*stages) for name, stages in stages_of.items()}


def unused_names(model: nn.Module, holders: Holders) -> list[str]:
    """The tensors that no stage uses; rank 0 keeps them for checkpoints."""
    return [name for name in named_state.tensors_of(model) if name not in holders]


def fill_local_tensors(
    rank: int,
    components: Components,
    local_tensors: LocalTensors,
    holders: Holders,
    stored: checkpoints.StoredCheckpoint | None,
) -> None:
    """Fill this worker's tensors from the model factory, or from the checkpoint that rank 0 has `stored`.

    All workers call it together. Tensors are sent one at a time.
    """
    stored = stored if rank == 0 else None
    tensors = named_state.tensors_of(components.model)
    local = {name for name in tensors if rank in holders.get(name, (0,))}
    local_tensors.fill(local)
    known = set(broadcast_value([] if stored is None else list(stored.model), 0))
    with torch.no_grad():
        for name, tensor in tensors.items():
            # Broadcast, since the factory may give other values on each worker.
            source = 0 if name in known else holders.get(name, (0,))[0]
            value = stored.model[name] if stored is not None and name in known else None
            _share(tensor, source, rank, name in local, value)
    _share_optimizer(rank, components, local, stored)


def _share(tensor: Tensor, source: int, rank: int, is_local: bool, value: Tensor | None) -> None:
    """Broadcast one tensor, or `value` for it, from `source` to the ranks that hold it."""
    if not tensor.numel():
        return
    if rank == source:
        buffer = (tensor.detach() if value is None else value.to(tensor.device, tensor.dtype)).contiguous()
    else:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    dist.broadcast(buffer, source)
    if is_local and (rank != source or value is not None):
        tensor.data.copy_(buffer)


def _share_optimizer(
    rank: int, components: Components, local: set[str], stored: checkpoints.StoredCheckpoint | None
) -> None:
    """Load the stored state of the optimizer for the parameters that this worker holds."""
    specs = []
    if stored is not None:
        for path in stored.optimizer:
            dtype = str(stored.optimizer.dtype(path)).removeprefix("torch.")
            specs.append([path, dtype, list(stored.optimizer.shape(path))])
    state: named_state.Tensors = {}
    for path, dtype, shape in broadcast_value(specs, 0):
        buffer = torch.empty(shape, dtype=getattr(torch, dtype))
        if stored is not None and rank == 0:
            buffer = stored.optimizer[path].contiguous()
        dist.broadcast(buffer, 0)
        if path.rpartition("/")[0] in local:
            state[path] = buffer
    if state:
        named_state.load_optimizer_state(components.optimizer, components.names, state)
