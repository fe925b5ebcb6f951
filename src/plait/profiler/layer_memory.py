"""Memory of each layer: its outputs, what autograd saves for backward, and the peak of its allocations."""

from __future__ import annotations

import bisect
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from plait.profiler.timing import BackwardTimer, LayeredModel, Stopwatch
from plait.profiler.traced_model import TracedModel

_MARK = "plait.mark."


@dataclass(frozen=True)
class Weights:
    """Bytes of one microbatch: of each value by name, and saved for backward by each layer.

    `keepers` are the layers, by number, to which a saved value of another layer is attributed.
    `working_bytes` is the peak of each layer, forward or backward, beyond what earlier layers save, without
    gradients of parameters. `adding_bytes` is the additional peak if its gradients are accumulated.
    """

    value_bytes: dict[str, int]
    kept_bytes: list[int]
    keepers: dict[str, int]
    working_bytes: list[float]
    adding_bytes: list[float]


def weigh(
    traced: TracedModel,
    model: LayeredModel,
    inputs: Sequence[Tensor],
    loss: Callable[[Any], Tensor],
    device: torch.device,
) -> Weights:
    """Run a step and measure real tensors; what the loss saves is attributed to the last layer.

    A tensor that several layers save is attributed to the first of them, so that the sum over layers is what
    the model saves; parameters, buffers and constants are not counted. A stage that saves a received tensor
    holds another copy of it, which is counted by the tensor's edge.
    """
    scale, forward, backward = _run_step(traced, model, inputs, loss, device)
    working = _working(scale.kept_bytes, forward, backward, _gradients_behind(traced))
    adding = [0.0] * len(working)
    if device.type == "cuda":  # on a CPU a pipeline's linear layers accumulate in the product
        _, forward, backward = _run_step(traced, model, inputs, loss, device)
        with_others = _working(scale.kept_bytes, forward, backward, adding)
        adding = [max(0.0, more - alone) for more, alone in zip(with_others, working)]
    return Weights(scale.value_bytes, scale.kept_bytes, scale.keepers, working, adding)


def _run_step(
    traced: TracedModel,
    model: LayeredModel,
    inputs: Sequence[Tensor],
    loss: Callable[[Any], Tensor],
    device: torch.device,
) -> tuple[_Scale, list[float], list[float]]:
    """The saved tensors of a step, and the peak of each layer, forward and backward; the loss is last."""
    held = [*traced.model.parameters(), *traced.model.buffers(), *traced.constants.values()]
    scale = _Scale({_storage(tensor) for tensor in held}, [0] * len(traced.layers))
    levels = Levels(device)
    forward = Stopwatch(levels)

    @contextmanager
    def around(layer: int) -> Iterator[None]:
        with scale.watch(layer), forward.lap(layer):
            yield

    with levels.recording():
        output, ends = model.run(inputs, around, scale.record)
        with around(len(traced.layers) - 1):
            value = loss(output)
        del output
        backward = BackwardTimer(levels, [*ends, [value.grad_fn]])
        backward.run(value)
    return scale, forward.laps(), _highest(backward, levels, len(ends))


def _highest(backward: BackwardTimer, levels: Levels, layers: int) -> list[float]:
    """The peak in the backward of each layer, and of the loss after them."""
    highest = [0.0] * (layers + 1)
    for (layer, start), (_, end) in itertools.pairwise(backward.switches):
        highest[layer] = max(highest[layer], levels.between(start, end))
    return highest


def _gradients_behind(traced: TracedModel) -> list[float]:
    """The bytes of parameter gradients that exist after the backward of each layer."""
    sizes = {name: p.numel() * p.element_size() for name, p in traced.model.named_parameters()}
    # The gradient of a parameter is created in the last layer that uses it, the first in backward.
    made = [sum(sizes.pop(name, 0) for name in layer.parameters) for layer in reversed(traced.layers)]
    return [float(behind) for behind in reversed(list(itertools.accumulate(made)))]


def _working(
    kept: Sequence[int], forward: Sequence[float], backward: Sequence[float], gradients: Sequence[float]
) -> list[float]:
    """The peak of each layer beyond what earlier layers save; the loss is attributed to the last.

    `gradients` are the bytes of parameter gradients after the backward of each layer.
    """
    working = []
    for i in range(len(kept)):
        levels = [forward[i], backward[i] - gradients[i]]
        if i == len(kept) - 1:
            levels += [forward[-1], backward[-1]]
        working.append(max(0.0, max(levels) - sum(kept[:i])))
    return working


@dataclass
class _Scale:
    """Sums the bytes that layers save, each storage once; `counted` are the storages counted already."""

    counted: set[int]
    kept_bytes: list[int]
    value_bytes: dict[str, int] = field(default_factory=dict)
    keepers: dict[str, int] = field(default_factory=dict)
    # The value of a storage while it is alive; the memory may be reused later.
    _values: dict[int, tuple[str, weakref.ref[Tensor]]] = field(default_factory=dict)
    _layer: int = 0

    @contextmanager
    def watch(self, layer: int) -> Iterator[None]:
        self._layer = layer
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def record(self, name: str, tensor: Tensor) -> None:
        """Record a value that a layer has returned."""
        self.value_bytes[name] = tensor.numel() * tensor.element_size()
        self._values[_storage(tensor)] = name, weakref.ref(tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self.counted:
            self.counted.add(storage)
            self.kept_bytes[self._layer] += tensor.untyped_storage().nbytes()
            if storage in self._values and self._values[storage][1]() is not None:
                self.keepers[self._values[storage][0]] = self._layer
        return tensor.detach()  # the tensor itself would keep its graph alive


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Levels:
    """Marks moments, like a clock, while torch's profiler records each allocation on `device`.

    Bytes are relative to the start of the recording, and include workspaces inside operations.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type.upper()
        self._marks = itertools.count()
        self._moments: dict[str, int] = {}
        self._changes: list[tuple[int, int]] = []

    def mark(self) -> str:
        name = f"{_MARK}{next(self._marks)}"
        with record_function(name):
            return name

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record allocations in the block; `between` can be called afterwards."""
        with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            yield
        results = record.profiler.kineto_results if record.profiler is not None else None
        assert results is not None
        level = 0
        for event in sorted(results.events(), key=lambda event: event.start_ns()):
            if event.name().startswith(_MARK):
                self._moments[event.name()] = event.start_ns()
            elif event.name() == "[memory]" and event.device_type().name == self._kind:
                level += event.nbytes()
                self._changes.append((event.start_ns(), level))

    def between(self, start: Any, end: Any) -> float:
        """The peak of allocated bytes between two marks."""
        first = bisect.bisect_right(self._changes, (self._moments[start], 0))
        last = bisect.bisect_left(self._changes, (self._moments[end], 0))
        # Start from the level before the first change in the range.
        levels = [level for _, level in self._changes[max(0, first - 1) : last]]
        return float(max(levels, default=0))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the profiler's messages on the terminal."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
