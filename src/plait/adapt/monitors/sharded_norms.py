"""Squared norms of the workers' gradients under `fully_shard` (FSDP2), which scatters their mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.adapt.monitors.squared_norms import gradients, squared_norm
from plait.core.errors import InputError

# Its names from torch 2.13 on, and before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@runtime_checkable
class ShardsGradients(Protocol):
    """A module that `fully_shard` was applied to."""

    def set_custom_reduce_scatter(self, comm: Any) -> None: ...


class ShardedNorms:
    """Measures the gradients of a `fully_shard` model in backward, before they are summed and scattered.

    It takes the place of the reduce-scatter of all its modules. Gradients may be divided before they are
    summed; the norm of the mean, before and after, says by how much.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        meshes = {each.device_mesh for each in self._parameters if hasattr(each, "device_mesh")}
        if len(meshes) != 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise InputError(
                "the gradient noise scale needs fully_shard over one mesh of one dimension, found "
                + (", ".join(str(mesh) for mesh in meshes) or "no parameter that is a DTensor")
                + "; give it plait.DataParallel or DistributedDataParallel, or measure on a smaller mesh"
            )
        (mesh,) = meshes
        self._group = mesh.get_group()
        # Of this worker in the last backward: its gradients, and its part of their mean.
        self._local: list[Tensor] = []
        self._mean: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, ShardsGradients):
                module.set_custom_reduce_scatter(self)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message, as torch asks for it."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum and scatter gradients, as torch does without this."""
        self._local.append(squared_norm([input_tensor]))
        work: dist.Work | None = _reduce_scatter(
            output=output_tensor, input=input_tensor, op=op, group=group, async_op=async_op
        )
        if work is not None:
            work.wait()
        workers = 1 if op == dist.ReduceOp.AVG else dist.get_world_size(group)
        self._mean.append(squared_norm([output_tensor]) / workers**2)
        return work

    def take(self, samples: int) -> Tensor:
        """The sums over the workers of the last backward; each worker has an equal share of `samples`."""
        size = dist.get_world_size(self._group)
        if not self._local and size > 1:
            raise InputError("update: no backward pass of the fully_shard model was seen before it")
        total = squared_norm(gradients(self._parameters)) * samples
        if size > 1:  # one worker sends nothing
            sums = torch.stack([torch.stack(self._local).sum(), torch.stack(self._mean).sum()])
            self._local, self._mean = [], []
            dist.all_reduce(sums, group=self._group)
            parts, mean = sums
            total = torch.where(mean > 0, total * parts / (mean * size), 0.0)
        return torch.stack([total, torch.full_like(total, samples), torch.full_like(total, size)])
