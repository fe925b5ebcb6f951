"""Giving each worker of a pipeline its own tensors of a model that nobody holds as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.comm.collectives import broadcast_value
from plait.pipeline import named_state
from plait.pipeline.cutting.meta_device import OwnTensors
from plait.pipeline.layout import PipelineLayout
from plait.profiler.traced import TracedModel
from plait.training import checkpoint as checkpoints
from plait.training.components import Components

# The workers that hold each parameter and buffer that some stage uses, by its first name.
Holders = Mapping[str, Sequence[int]]


def stages_by_name(traced: TracedModel, pipeline_layout: PipelineLayout) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter and buffer."""
    found: dict[str, dict[int, None]] = {}
    for stage, ids in enumerate(pipeline_layout.stages):
        for layer in traced.select(ids):
            for name in (*layer.parameters, *layer.buffers):
                found.setdefault(name, {})[stage] = None
    return {name: tuple(stages) for name, stages in found.items()}


def names_by_stage(traced: TracedModel, pipeline_layout: PipelineLayout) -> Holders:
    """Who holds what the stages use."""
    stages_of = stages_by_name(traced, pipeline_layout)
    return {name: pipeline_layout.holders(*stages) for name, stages in stages_of.items()}


def unused_names(model: nn.Module, holders: Holders) -> list[str]:
    """The tensors that no stage uses; rank 0 keeps them for checkpoints."""
    return [name for name in named_state.tensors_of(model) if name not in holders]


def fill_pieces(
    rank: int,
    parts: Components,
    pieces: OwnTensors,
    holders: Holders,
    stored: checkpoints.StoredCheckpoint | None,
) -> None:
    """Give this worker's tensors their values: the factory's, or those that rank 0 has `stored`.

    All workers call it together. One tensor is on its way at a time.
    """
    stored = stored if rank == 0 else None
    tensors = named_state.tensors_of(parts.model)
    own = {name for name in tensors if rank in holders.get(name, (0,))}
    pieces.fill(own)
    known = set(broadcast_value([] if stored is None else list(stored.model), 0))
    with torch.no_grad():
        for name, tensor in tensors.items():
            # Replicas agree also where the factory is not the same everywhere.
            source = 0 if name in known else holders.get(name, (0,))[0]
            value = stored.model[name] if stored is not None and name in known else None
            _share(tensor, source, rank, name in own, value)
    _share_optimizer(rank, parts, own, stored)


def _share(tensor: Tensor, source: int, rank: int, is_own: bool, value: Tensor | None) -> None:
    """Bring one tensor from `source`, which has it as its own or as `value`, to those that hold it."""
    if not tensor.numel():
        return
    if rank == source:
        carried = (tensor.detach() if value is None else value.to(tensor.device, tensor.dtype)).contiguous()
    else:
        carried = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    dist.broadcast(carried, source)
    if is_own and (rank != source or value is not None):
        tensor.data.copy_(carried)


def _share_optimizer(
    rank: int, parts: Components, own: set[str], stored: checkpoints.StoredCheckpoint | None
) -> None:
    """Load the stored state of the optimizer for the parameters that this worker holds."""
    specs = []
    if stored is not None:
        for path in stored.optimizer:
            dtype = str(stored.optimizer.dtype(path)).removeprefix("torch.")
            specs.append([path, dtype, list(stored.optimizer.shape(path))])
    found: named_state.Tensors = {}
    for path, dtype, shape in broadcast_value(specs, 0):
        carried = torch.empty(shape, dtype=getattr(torch, dtype))
        if stored is not None and rank == 0:
            carried = stored.optimizer[path].contiguous()
        dist.broadcast(carried, 0)
        if path.rpartition("/")[0] in own:
            found[path] = carried
    if found:
        named_state.load_optimizer_state(parts.optimizer, parts.names, found)
