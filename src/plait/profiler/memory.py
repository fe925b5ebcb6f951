"""Bytes: what each layer returns, and what autograd keeps of it until the backward pass."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.profiler.levels import Levels
from plait.profiler.timing import BackwardTimer, LayeredModel, Stopwatch
from plait.profiler.traced import TracedModel


@dataclass(frozen=True)
class Weights:
    """Bytes of one microbatch: of each value by name, and kept for the backward pass by each layer.

    `keepers` are the layers, by their number, for which a value that another layer returned was counted.
    `working_bytes` is what each layer takes at work, forward or backward, beyond what those before it keep;
    gradients of parameters aside. `adding_bytes` is what it takes more where its gradients are added to
    others.
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
    """Run a step and weigh the real tensors; what the loss keeps counts for the last layer.

    A tensor that several layers keep counts for the first of them, so that the sum over layers is what the
    model keeps; parameters, buffers and constants are not counted. A stage that keeps a tensor it received
    from the layer that counts it holds that copy besides, which is the tensor's edge.
    """
    scale, forward, backward = _run_step(traced, model, inputs, loss, device)
    working = _working(scale.kept_bytes, forward, backward, _gradients_behind(traced))
    adding = [0.0] * len(working)
    if device.type == "cuda":  # a pipeline's linear layers on a CPU add in the product itself
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
    """What a step keeps, and the highest level of each layer, forward and backward, the loss's at the end."""
    own = [*traced.model.parameters(), *traced.model.buffers(), *traced.constants.values()]
    scale = _Scale({_storage(tensor) for tensor in own}, [0] * len(traced.layers))
    levels = Levels(device)
    forward = Stopwatch(levels)

    @contextmanager
    def around(layer: int) -> Iterator[None]:
        with scale.watch(layer), forward.lap(layer):
            yield

    with levels.recording():
        output, ends = model.run(inputs, around, scale.note)
        with around(len(traced.layers) - 1):
            value = loss(output)
        del output
        backward = BackwardTimer(levels, [*ends, [value.grad_fn]])
        backward.run(value)
    return scale, forward.laps(), _highest(backward, levels, len(ends))


def _highest(backward: BackwardTimer, levels: Levels, layers: int) -> list[float]:
    """The highest level in the backward of each layer, and of the loss behind them."""
    found = [0.0] * (layers + 1)
    for (layer, start), (_, end) in itertools.pairwise(backward.switches):
        found[layer] = max(found[layer], levels.between(start, end))
    return found


def _gradients_behind(traced: TracedModel) -> list[float]:
    """The gradients of parameters that there are once backward is through each layer."""
    sizes = {name: p.numel() * p.element_size() for name, p in traced.model.named_parameters()}
    # Backward comes to the last layer that uses a parameter first: there its gradient is made.
    own = [sum(sizes.pop(name, 0) for name in layer.parameters) for layer in reversed(traced.layers)]
    return [float(behind) for behind in reversed(list(itertools.accumulate(own)))]


def _working(
    kept: Sequence[int], forward: Sequence[float], backward: Sequence[float], gradients: Sequence[float]
) -> list[float]:
    """What each layer takes beyond what the layers before it keep; the loss counts for the last.

    `gradients` are those that backward has made of parameters when it is through each layer.
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
    """Adds up what layers keep, each storage once; `counted` are those that count no more."""

    counted: set[int]
    kept_bytes: list[int]
    value_bytes: dict[str, int] = field(default_factory=dict)
    keepers: dict[str, int] = field(default_factory=dict)
    # Whose memory it is, as long as the value lives: it may serve another later.
    _values: dict[int, tuple[str, weakref.ref[Tensor]]] = field(default_factory=dict)
    _layer: int = 0

    @contextmanager
    def watch(self, layer: int) -> Iterator[None]:
        self._layer = layer
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def note(self, name: str, tensor: Tensor) -> None:
        """See a value that a layer has returned."""
        self.value_bytes[name] = tensor.numel() * tensor.element_size()
        self._values[_storage(tensor)] = name, weakref.ref(tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self.counted:
            self.counted.add(storage)
            self.kept_bytes[self._layer] += tensor.untyped_storage().nbytes()
            if storage in self._values and self._values[storage][1]() is not None:
                self.keepers[self._values[storage][0]] = self._layer
        return tensor.detach()  # the tensor itself would hold its own graph alive


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
