"""Times the forward and backward of each layer inside real training steps.

A step runs layer by layer over one autograd graph, so each layer has the same tensors, caches and memory as
in training; nothing is detached, copied or run separately. In backward, a hook on each node of the graph
records when the engine reaches another layer's nodes. On a GPU the host needs more time for such a step than
for a plain one; the GPU sleeps that long before the step, so that it does not wait for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.profiler.build import build
from plait.profiler.traced_model import Boundary, TracedModel

Loss = Callable[[Any], Tensor]
# The context of the call of layer i, and the callback for values between layers.
Surrounding = Callable[[int], AbstractContextManager[Any]]
Watcher = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Timed:
    """The median of repeated measurements, and their interquartile range."""

    seconds: float
    spread_s: float

    @staticmethod
    def of(samples: Sequence[float]) -> Timed:
        if len(samples) < 2:
            return Timed(samples[0], 0.0)
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Timed(statistics.median(samples), high - low)


class Marks(Protocol):
    """Sets marks between layers and measures the time between two of them."""

    def mark(self) -> Any: ...
    def between(self, start: Any, end: Any) -> float: ...


class Clock:
    """Marks moments on a device; the seconds between them can be read after synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """A mark: the host's time, or on CUDA an event on the current stream."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait until all work is done, so that marks can be read."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def sleep(self, seconds: float) -> None:
        """Keep a GPU busy for `seconds`, so that the host can queue work."""
        if self._is_cuda and seconds > 0:
            with torch.cuda.device(self._device):
                torch.cuda._sleep(int(seconds * self._cycles_per_s))

    @cached_property
    def _cycles_per_s(self) -> float:
        cycles = 20_000_000
        with torch.cuda.device(self._device):
            torch.cuda._sleep(cycles)
            start = self.mark()
            torch.cuda._sleep(cycles)
            end = self.mark()
            self.synchronize()
        return cycles / self.between(start, end)

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._is_cuda else end - start)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, by layer; the loss is attributed to the last layer.

    `host_s` is how long the host took to launch it.
    """

    forward_s: list[float]
    backward_s: list[float]
    host_s: float


class LayeredModel:
    """A traced model that runs one layer after another over the same parameters."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self._boundaries = [traced.boundary([layer]) for layer in traced.layers]
        self._modules = [
            build(traced, (layer,), boundary, own_inputs=False)
            for layer, boundary in zip(traced.layers, self._boundaries)
        ]
        self._dying = _last_uses(self._boundaries, traced.outputs)

    def run(
        self,
        inputs: Sequence[Tensor],
        around: Surrounding,
        on_value: Watcher | None = None,
    ) -> tuple[Any, list[list[Any]]]:
        """The model's output, and the autograd nodes of each layer's outputs.

        `around` returns the context of each layer; `on_value` is called with each value between layers.
        """
        values: dict[str, Tensor] = dict(zip(self._traced.inputs, inputs))
        ends: list[list[Any]] = []
        for i, (module, boundary) in enumerate(zip(self._modules, self._boundaries)):
            arguments = [values[name] for name in boundary.inputs]
            with around(i):
                # Not by nn.Module.__call__, whose overhead the whole model has only once.
                results = module.forward(*arguments)
            del arguments
            for name, tensor in zip(boundary.outputs, results):
                values[name] = tensor
                if on_value is not None:
                    on_value(name, tensor)
            ends.append([tensor.grad_fn for tensor in results if tensor.grad_fn is not None])
            del results
            for name in self._dying[i]:
                del values[name]
        return self._traced.rebuild_output(values), ends


def _last_uses(boundaries: Sequence[Boundary], outputs: Sequence[str]) -> list[list[str]]:
    """The values that are no longer needed after each layer."""
    last: dict[str, int] = {}
    for i, boundary in enumerate(boundaries):
        last |= dict.fromkeys((*boundary.inputs, *boundary.outputs), i)
    dying: list[list[str]] = [[] for _ in boundaries]
    for name, i in last.items():
        if name not in outputs:
            dying[i].append(name)
    return dying


def time_layers(
    model: LayeredModel, inputs: Sequence[Tensor], loss: Loss, clock: Clock, head_start_s: float = 0.0
) -> StepTimes:
    """One step, timed layer by layer. Gradients are accumulated on the parameters.

    `head_start_s` is the host's overhead of the timing itself; a GPU first sleeps that long.
    """
    clock.synchronize()
    began = time.perf_counter()
    clock.sleep(head_start_s)
    stopwatch = Stopwatch(clock)
    output, ends = model.run(inputs, stopwatch.lap)
    with stopwatch.lap(len(ends)):
        value = loss(output)
    del output
    backward = BackwardTimer(clock, [*ends, [value.grad_fn]])
    backward.run(value)
    host_s = time.perf_counter() - began
    clock.synchronize()
    return StepTimes(_fold_loss(stopwatch.laps()), _fold_loss(backward.laps()), host_s)


def _fold_loss(seconds: list[float]) -> list[float]:
    *layers, loss = seconds
    layers[-1] += loss
    return layers


class Stopwatch:
    """Seconds spent inside `lap(i)`, for each i in turn."""

    def __init__(self, clock: Marks) -> None:
        self._clock = clock
        self._marks: list[tuple[Any, Any]] = []

    def lap(self, _index: int) -> Stopwatch:
        return self

    def __enter__(self) -> None:
        self._start = self._clock.mark()

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._start, self._clock.mark()))

    def laps(self) -> list[float]:
        return [self._clock.between(start, end) for start, end in self._marks]


class BackwardTimer:
    """Attributes the time of one backward pass to the layers whose autograd nodes run."""

    def __init__(self, clock: Marks, ends: list[list[Any]]) -> None:
        self._clock = clock
        self._count = len(ends)
        self._current = self._count - 1
        self.switches: list[tuple[int, Any]] = []
        # Kept alive, as nodes are distinguished by identity.
        self._nodes: set[Any] = set()
        for layer, nodes in enumerate(ends):
            self._assign(layer, nodes)

    def _assign(self, layer: int, nodes: list[Any]) -> None:
        """Hook the nodes that lead to `nodes` and belong to no layer yet.

        A node that accumulates the gradient of a parameter runs directly after the node that computed it, and
        is attributed to the same layer.
        """
        waiting = [node for node in nodes if node is not None]
        while waiting:
            node = waiting.pop()
            if node in self._nodes or node.name() == "torch::autograd::AccumulateGrad":
                continue
            self._nodes.add(node)
            node.register_prehook(lambda _grads: self._enter(layer))
            waiting += [following for following, _ in node.next_functions if following is not None]

    def _enter(self, layer: int) -> None:
        if layer != self._current:
            self._current = layer
            self.switches.append((layer, self._clock.mark()))

    def run(self, value: Tensor) -> None:
        self.switches.append((self._current, self._clock.mark()))
        value.backward()
        self.switches.append((-1, self._clock.mark()))
        self._nodes.clear()

    def laps(self) -> list[float]:
        seconds = [0.0] * self._count
        for (layer, start), (_, end) in zip(self.switches, self.switches[1:]):
            seconds[layer] += self._clock.between(start, end)
        return seconds


def time_whole(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss, clock: Clock
) -> tuple[float, float]:
    """Seconds of one step of the unmodified model (forward, loss, backward), and of the host to launch it."""
    clock.synchronize()
    began = time.perf_counter()
    start = clock.mark()
    loss(model(*args, **kwargs)).backward()
    end = clock.mark()
    host_s = time.perf_counter() - began
    clock.synchronize()
    return clock.between(start, end), host_s
