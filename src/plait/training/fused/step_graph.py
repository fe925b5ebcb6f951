"""An array's step as a CUDA graph: on a GPU, launching a fused step takes Python longer than the step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.fusion import Shared
from plait.fusion.speed.cuda_graph import CapturedStep

# Eager steps before one is captured, so that libraries initialize and autotune first.
WARM_UP = 3
log = logging.getLogger(__name__)


class StepGraph:
    """Runs `step(content)`; after a few calls with the same shapes, by replaying a CUDA graph of it.

    Every step is a real one, on the content it is given: what warms up trains too.
    """

    def __init__(self, step: Callable[[Any], Tensor], clear: Callable[[], None]) -> None:
        self._step = step
        self._clear = clear
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, CapturedStep] = {}
        self._can_capture = True

    def __call__(self, content: Any) -> Tensor:
        """What the step returns for `content`, trials' inputs and target on the device."""
        leaves, spec = pytree.tree_flatten(content)
        if not self._can_capture or not all(isinstance(leaf, (Tensor, Shared)) for leaf in leaves):
            return self._step(content)
        shared = tuple(isinstance(leaf, Shared) for leaf in leaves)
        tensors = [leaf.tensor if isinstance(leaf, Shared) else leaf for leaf in leaves]
        key = (str(spec), shared, tuple((tuple(x.shape), x.stride(), x.dtype) for x in tensors))
        if key in self._graphs:
            losses: Tensor = self._graphs[key](*tensors).clone()
            return losses
        self._seen[key] += 1
        if self._seen[key] <= WARM_UP or not self._capture(key, tensors, shared, spec):
            return self._step(content)
        captured: Tensor = self._graphs[key](*tensors).clone()
        return captured

    def _capture(self, key: Hashable, tensors: list[Tensor], shared: tuple[bool, ...], spec: Any) -> bool:
        def step(*given: Tensor) -> Tensor:
            leaves = [Shared(x) if is_shared else x for x, is_shared in zip(given, shared)]
            return self._step(pytree.tree_unflatten(leaves, spec))

        try:
            self._graphs[key] = CapturedStep(step, tensors, warm_up=0, clear=self._clear)
        except RuntimeError as failure:
            # A model may do what a graph cannot hold, such as a copy to the host.
            log.warning("training without CUDA graphs: %s", str(failure).splitlines()[0])
            self._can_capture = False
            torch.cuda.synchronize()
        return self._can_capture
