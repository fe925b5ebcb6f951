"""Bytes: what each layer returns, and what autograd keeps of it until the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.profiler.timing import LayeredModel
from plait.profiler.traced import TracedModel


@dataclass(frozen=True)
class Weights:
    """Bytes of one microbatch: of each value by name, and kept for the backward pass by each layer."""

    value_bytes: dict[str, int]
    kept_bytes: list[int]


def weigh(traced: TracedModel, model: LayeredModel, inputs: Sequence[Tensor]) -> Weights:
    """Run forward once and weigh the real tensors.

    A tensor that several layers keep counts for the first of them, so that the sum over layers is what the
    model keeps; parameters, buffers and constants are not counted. A stage that keeps a tensor it received
    holds that copy besides, which is the tensor's edge.
    """
    own = [*traced.model.parameters(), *traced.model.buffers(), *traced.constants.values()]
    counted = {_storage(tensor) for tensor in own}
    kept_bytes = [0] * len(traced.layers)

    @contextmanager
    def watch(layer: int) -> Iterator[None]:
        def pack(tensor: Tensor) -> Tensor:
            storage = _storage(tensor)
            if storage not in counted:
                counted.add(storage)
                kept_bytes[layer] += tensor.untyped_storage().nbytes()
            return tensor.detach()  # the tensor itself would hold its own graph alive

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    value_bytes: dict[str, int] = {}

    def note(name: str, tensor: Tensor) -> None:
        value_bytes[name] = tensor.numel() * tensor.element_size()

    model.run(inputs, watch, note)
    return Weights(value_bytes, kept_bytes)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
