"""A training step captured as one CUDA graph, which removes the Python overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.fusion.errors import FusionError


class CapturedStep:
    """Replays `step(*inputs)` with new inputs of the same shapes.

    The step first runs `warm_up` times without capture: weights change, and operations are autotuned. `clear`
    then frees gradients. Python values that it reads during capture are fixed; a learning rate set in the
    optimizer affects replays, since it is on the device. Outputs are overwritten by the next call. Capture
    again when trials have joined or left, or after `fused.to(...)`: a replay writes to the tensors of the
    capture.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: Sequence[Tensor],
        warm_up: int = 3,
        clear: Callable[[], None] | None = None,
    ) -> None:
        # A replay writes to the weights and states that the step holds, which must not be freed before.
        self._step = step
        self._inputs = [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                step(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        if clear is not None:
            clear()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = step(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        """The output of the step for these inputs."""
        copy_inputs(self._inputs, inputs)
        self._graph.replay()
        return pytree.tree_map(lambda x: x, self._outputs)


def copy_inputs(static: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy what a step is given to where its graph reads it; raises FusionError for other shapes or types."""
    found, expected = ([(tuple(x.shape), x.dtype) for x in inputs] for inputs in (given, static))
    if found != expected:
        raise FusionError(
            f"CapturedStep: found inputs {found}, expected those of the capture: {expected}",
            "call the step itself for such a batch, or capture it for these shapes, too",
        )
    for to, of in zip(static, given):
        to.copy_(of)
