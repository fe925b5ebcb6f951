"""One stage on one worker: forward and backward of a microbatch, whole or in two halves."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plait.comm.links.packing import Message
from plait.data.calling import explaining_type_errors
from plait.data.loader import seed_all
from plait.pipeline.cutting.cut import StageModule
from plait.pipeline.loss_scale import LossScale
from plait.pipeline.module_state import ModuleMemory, Remembered
from plait.pipeline.split_backward import DeferWeights
from plait.pipeline.weight_stash import WeightVersions
from plait.profiler.traced import TracedModel, Value
from plait.verification.observe import RandomState

Autocast = Callable[[], AbstractContextManager[Any]]
Loss = Callable[[Any, Any], Tensor]


@dataclass
class Flight:
    """A microbatch between its forward and its backward in one stage.

    `versions` are those of the runner's weights that it uses. `inputs` are leaves of autograd, `outputs`
    still have their graph, by the names of values; once they are sent, `edges` are their places in the
    graph. `messages` lend the memory of the inputs and are given back when the flight is over.
    """

    inputs: dict[str, Tensor]
    seed: int
    versions: tuple[int, ...]
    target: Any = None
    weight: float = 1.0
    outputs: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    deferred: DeferWeights | None = None
    # What the stage's modules held before a forward that is computed again.
    before: Remembered | None = None
    messages: list[Message] = field(default_factory=list)
    # Where random numbers start instead of the seed, the stage that they come from, and where they end.
    random_state: RandomState | None = None
    random_from: int = -1
    random_after: RandomState | None = None

    def let_go_of_outputs(self) -> None:
        """Keep the outputs' places in the graph, from which backward starts, but not their memory."""
        self.edges = {name: get_gradient_edge(t) for name, t in self.outputs.items() if t.requires_grad}
        self.outputs = {}

    def land(self) -> None:
        """Give the memory of what was received back to the senders."""
        self.inputs.clear()
        self.edges.clear()
        for message in self.messages:
            message.release()


@dataclass(frozen=True)
class LossOf:
    """The loss of what the model returns, from the values that its stages made."""

    traced: TracedModel
    loss: Loss

    def output(self, values: Mapping[str, Tensor]) -> Any:
        return self.traced.rebuild_output([values[name] for name in self.traced.outputs])

    def __call__(self, values: Mapping[str, Tensor], target: Any) -> Tensor:
        return self.loss(self.output(values), target)


@dataclass
class StageRunner:
    """Runs one stage's module. `loss_of` turns the model's outputs and the target into the loss.

    It is None but for the last stage. Without `versions` the module's own parameters are used; where there
    are several, each has some of them. With `split` a backward leaves the weights' gradients for later.
    Backward starts from `scale` times the loss, where there is one.
    """

    stage: StageModule
    versions: Sequence[WeightVersions]
    loss_of: Callable[[Mapping[str, Tensor], Any], Tensor] | None
    autocast: Autocast
    recompute: bool = False
    split: bool = False
    scale: LossScale | None = None
    # Sets where random numbers start, from the number of a flight.
    seed: Callable[[int], None] = seed_all

    def __post_init__(self) -> None:
        stage = self.stage
        self._memory = ModuleMemory(stage.module, stage.written, stage.keeping)

    def forward(self, flight: Flight) -> None:
        """Fill the flight's outputs, and its loss where this is the last stage."""
        for weights, version in zip(self.versions, flight.versions):
            weights.use(version)
        if self.recompute:
            flight.before = self._memory.capture()
            with torch.no_grad():
                self._run(flight)
            self._memory.note_written(flight.before)
        else:
            self._run(flight)

    def evaluate(self, flight: Flight) -> None:
        """As `forward` of a microbatch that never goes backward, with the module in evaluation mode."""
        with torch.no_grad(), self.autocast():
            flight.outputs = self._call(flight, self.stage.evaluation_inputs, self.stage.evaluation_outputs)

    def backward(self, flight: Flight, grads: Mapping[str, Tensor]) -> None:
        """Leave gradients on the flight's inputs and on the weights; `grads` are those of the outputs."""
        if self.recompute:
            self._run_again(flight)
        if flight.loss is not None:
            whole = None if self.scale is None else torch.full_like(flight.loss, self.scale.value)
            flight.loss.backward(whole)
        else:
            pairs = [(flight.edges[name], grad) for name, grad in grads.items() if name in flight.edges]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        if not self.split:
            self._release(flight)

    def backward_weight(self, flight: Flight) -> None:
        """Do what a split backward has left."""
        assert flight.deferred is not None
        with torch.no_grad():
            flight.deferred.catch_up()
        flight.deferred = None
        self._release(flight)

    def own_gradients(self, flight: Flight, lent: Sequence[Message]) -> None:
        """Copy the gradients that autograd left in memory which is given back with `lent`, or read later.

        It takes a gradient, received or computed, or a view of it, for its own where it need not change it.
        """
        theirs = [t for message in lent for t in message.content.tensors if t is not None]
        theirs += flight.deferred.grads if flight.deferred is not None else []
        places = {tensor.untyped_storage().data_ptr() for tensor in theirs}
        used = [weights.leaves(version) for weights, version in zip(self.versions, flight.versions)]
        leaves = itertools.chain(*used) if used else self.stage.module.parameters()
        for leaf in itertools.chain(leaves, flight.inputs.values()):
            if leaf.grad is None:
                continue
            # The values of a sparse gradient may be a view of what came back.
            if leaf.grad.is_sparse or leaf.grad.untyped_storage().data_ptr() in places:
                leaf.grad = leaf.grad.clone()

    def _release(self, flight: Flight) -> None:
        for weights, version in zip(self.versions, flight.versions):
            weights.done(version)

    def _run(self, flight: Flight) -> None:
        # Dropout draws the same whenever, wherever and how often this microbatch runs.
        if flight.random_state is None:
            self.seed(flight.seed)
        else:
            flight.random_state.restore()
        defer = DeferWeights() if self.split else None
        with self.autocast(), defer or contextlib.nullcontext():
            flight.outputs = self._call(flight, self.stage.inputs, self.stage.outputs)
            if self.loss_of is not None:
                loss = self.loss_of({**flight.inputs, **flight.outputs}, flight.target)
                flight.loss = loss if flight.weight == 1.0 else loss * flight.weight
        flight.deferred = defer

    def _call(self, flight: Flight, taken: Sequence[Value], returned: Sequence[Value]) -> dict[str, Tensor]:
        inputs = tuple(flight.inputs[value.name] for value in taken)
        with explaining_type_errors(self.stage.module, inputs):
            given = self.stage.module(*inputs)
        return {value.name: tensor for value, tensor in zip(returned, given)}

    def _run_again(self, flight: Flight) -> None:
        """Forward with gradients this time, from the state that its first forward met; that of now stays."""
        for weights, version in zip(self.versions, flight.versions):
            weights.put(version)
        assert flight.before is not None
        now = self._memory.capture(copies=False)
        self._memory.put(flight.before)
        self._run(flight)
        flight.let_go_of_outputs()
        self._memory.put(now)
        flight.before = None
