"""How many trials fit into memory, computed from steps on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from plait.core.units import show_bytes
from plait.fusion.errors import FusionError

# Memory of libraries and the allocator, which fake tensors do not count: 540 and 545 MB on an H200
# (transformer and ResNet-18, 8 trials, bf16); measure it again for another machine.
OVERHEAD_BYTES = 600 * 10**6


@dataclass(frozen=True)
class MemoryNeed:
    """Memory of a fused step: constant bytes, and bytes per trial."""

    fixed_bytes: float
    trial_bytes: float

    def of(self, width: int) -> float:
        return self.fixed_bytes + self.trial_bytes * width

    def largest(self, memory_bytes: float, overhead_bytes: float) -> int:
        """The largest number of trials that fit into `memory_bytes`; raises if not even one fits."""
        width = int((memory_bytes - overhead_bytes - self.fixed_bytes) // self.trial_bytes)
        if width < 1:
            raise FusionError(
                f"width: one trial needs {show_bytes(self.of(1) + overhead_bytes)}, and there are "
                f"{show_bytes(memory_bytes)}; use a smaller batch"
            )
        return width


class _Peak(TorchDispatchMode):
    """Records the peak bytes of storages created while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self._see, outcome)
        return outcome

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._alive:
            self._alive[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self._alive.values()))


def step_bytes(make_step: Callable[[int], Callable[[], Any]], width: int) -> int:
    """The peak memory of building and running a step of `width` trials, without allocating it."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Peak() as peak, warnings.catch_warnings():
        # Data pointers are compared to notice moved memory; for fake tensors that is harmless.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        step = make_step(width)
        step()
        step()
    peak_bytes: int = peak.peak
    return peak_bytes


def measure_need(
    make_step: Callable[[int], Callable[[], Any]], widths: tuple[int, int] = (2, 4)
) -> MemoryNeed:
    """The memory need of a step, from steps of two widths on fake tensors.

    `make_step(width)` builds models, optimizer and data for `width` trials and returns the step.
    """
    low, high = widths
    first, second = step_bytes(make_step, low), step_bytes(make_step, high)
    each = (second - first) / (high - low)
    return MemoryNeed(max(0.0, first - each * low), each)
