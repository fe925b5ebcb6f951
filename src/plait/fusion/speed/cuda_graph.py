"""A training step as one CUDA graph: what Python does for a step is done once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class CapturedStep:
    """Replays `step(*inputs)` with new inputs of the same shapes.

    The step runs a few times first, for real: weights move, and operations measure their fastest ways. What
    it reads from Python while it is captured stays as it was; a learning rate set in the optimizer reaches
    the replays, since it lies on the device. Outputs are overwritten by the next call.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: Sequence[Tensor],
        warm_up: int = 3,
        clear: Callable[[], None] | None = None,
    ) -> None:
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
        """What the step returns for these inputs."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return pytree.tree_map(lambda x: x, self._outputs)
