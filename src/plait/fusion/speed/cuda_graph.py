"""A training step captured as one CUDA graph, which removes the Python overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class CapturedStep:
    """Replays `step(*inputs)` with new inputs of the same shapes.

    The step first runs a few times without capture: weights change, and operations are autotuned. Python
    values that it reads during capture are fixed; a learning rate set in the optimizer affects replays, since
    it is on the device. Outputs are overwritten by the next call.
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
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()
        return pytree.tree_map(lambda x: x, self._outputs)
