"""One stage on one worker: forward and backward of a microbatch; backward may be split in two."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plait.comm.links.packing import Message
from plait.data.call_model import as_arguments, explaining_type_errors
from plait.data.seeding import seed_all
from plait.pipeline.cutting.cut import StageModule
from plait.pipeline.module_state import ModuleMemory, ModuleSnapshot
from plait.pipeline.split_backward import DeferWeights
from plait.pipeline.updates.loss_scale import LossScaling
from plait.pipeline.updates.weight_stash import WeightVersions
from plait.profiler.traced_model import TracedModel, Value

Autocast = Callable[[], AbstractContextManager[Any]]
Loss = Callable[[Any, Any], Tensor]


def ordered_inputs(traced: TracedModel, inputs: Any) -> list[Tensor]:
    """The tensors of a microbatch in the order of a trace's inputs; refuses those it does not hold for."""
    tensors = traced.order_inputs(as_arguments(inputs))
    traced.check_inputs(tensors)
    return tensors


class RandomPosition(Protocol):
    """What random numbers go on from, such as `RandomState`."""

    def packed(self) -> Tensor: ...

    def restore(self) -> None: ...


@dataclass
class InFlight:
    """A microbatch between its forward and its backward in one stage.

    `versions` are the weight versions that it uses. `inputs` are leaves of autograd; `outputs` have a graph
    until they are sent, then `edges` keeps their gradient edges. All three are keyed by value name.
    `messages` own the memory of the inputs and are released after the backward.
    """

    inputs: dict[str, Tensor]
    seed: int
    versions: tuple[int, ...]
    target: Any = None
    weight: float = 1.0
    microbatch: int = 0
    outputs: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    deferred: DeferWeights | None = None
    # The state of the stage's modules before the forward, if backward recomputes it.
    before: ModuleSnapshot | None = None
    messages: list[Message] = field(default_factory=list)
    # The random state at the start (used instead of the seed), the stage it came from, and the state at the
    # end.
    random_state: RandomPosition | None = None
    random_from: int = -1
    random_after: RandomPosition | None = None

    def free_outputs(self) -> None:
        """Replace the outputs by their gradient edges, from which backward starts, to free their memory."""
        self.edges = {name: get_gradient_edge(t) for name, t in self.outputs.items() if t.requires_grad}
        self.outputs = {}

    def release(self) -> None:
        """Return the memory of received messages to the senders."""
        self.inputs.clear()
        self.edges.clear()
        for message in self.messages:
            message.release()


@dataclass(frozen=True)
class LossOf:
    """Computes the loss from the output values of the stages."""

    traced: TracedModel
    loss: Loss

    def __call__(self, values: Mapping[str, Tensor], target: Any) -> Tensor:
        return self.loss(self.traced.rebuild_output(values), target)


@dataclass
class StageRunner:
    """Runs one stage's module. `loss_of` turns the model's outputs and the target into the loss.

    It is None except in the last stage. `versions` are sets of stashed weights, each for some of the
    parameters; if empty, the module's parameters are used. With `split`, backward defers weight gradients.
    The loss is multiplied by `scale` before backward.
    """

    stage: StageModule
    versions: Sequence[WeightVersions]
    loss_of: Callable[[Mapping[str, Tensor], Any], Tensor] | None
    autocast: Autocast
    recompute: bool = False
    split: bool = False
    scale: LossScaling | None = None
    # Seeds the random number generators for a microbatch.
    seed: Callable[[int], None] = seed_all
    # Called with the number of a microbatch before each forward of it.
    begin: Callable[[int], None] = lambda microbatch: None

    def __post_init__(self) -> None:
        stage = self.stage
        self._memory = ModuleMemory(stage.state or stage.module, stage.written, stage.keeping)

    def forward(self, flight: InFlight) -> None:
        """Compute the outputs, and the loss in the last stage."""
        for weights, version in zip(self.versions, flight.versions):
            weights.use(version)
        if self.recompute:
            flight.before = self._memory.capture()
            with torch.no_grad():
                self._run(flight)
            self._memory.note_written(flight.before)
        else:
            self._run(flight)

    def evaluate(self, flight: InFlight) -> None:
        """Compute the outputs without a graph; the module is in evaluation mode."""
        with torch.no_grad(), self.autocast():
            flight.outputs = self._call(flight, self.stage.evaluation_inputs, self.stage.evaluation_outputs)

    def backward(self, flight: InFlight, grads: Mapping[str, Tensor]) -> None:
        """Accumulate gradients on the inputs and the weights; `grads` are the gradients of the outputs."""
        if self.recompute:
            self._run_again(flight)
        if flight.loss is not None:
            # The loss of fused trials is a vector, and so is their scale.
            whole = torch.ones_like(flight.loss)
            flight.loss.backward(whole if self.scale is None else whole * self.scale.value)
        else:
            pairs = [(flight.edges[name], grad) for name, grad in grads.items() if name in flight.edges]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        if not self.split:
            self._release(flight)

    def backward_weight(self, flight: InFlight) -> None:
        """Compute the weight gradients that a split backward deferred."""
        assert flight.deferred is not None
        with torch.no_grad():
            flight.deferred.catch_up()
        flight.deferred = None
        self._release(flight)

    def own_gradients(self, flight: InFlight, lent: Sequence[Message]) -> None:
        """Copy gradients whose memory belongs to the messages `lent`, or is still read by deferred jobs.

        Autograd may store a received tensor, or a view of it, as `.grad` without copying.
        """
        borrowed = [t for message in lent for t in message.content.tensors if t is not None]
        borrowed += flight.deferred.grads if flight.deferred is not None else []
        addresses = {tensor.untyped_storage().data_ptr() for tensor in borrowed}
        used = [weights.leaves(version) for weights, version in zip(self.versions, flight.versions)]
        leaves = itertools.chain(*used) if used else self.stage.module.parameters()
        for leaf in itertools.chain(leaves, flight.inputs.values()):
            if leaf.grad is None:
                continue
            # The values of a sparse gradient may be a view of a received tensor.
            if leaf.grad.is_sparse or leaf.grad.untyped_storage().data_ptr() in addresses:
                leaf.grad = leaf.grad.clone()

    def _release(self, flight: InFlight) -> None:
        for weights, version in zip(self.versions, flight.versions):
            weights.done(version)

    def _run(self, flight: InFlight) -> None:
        self.begin(flight.microbatch)
        # Dropout of a microbatch is the same when it is recomputed, and on any worker.
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

    def _call(self, flight: InFlight, taken: Sequence[Value], returned: Sequence[Value]) -> dict[str, Tensor]:
        inputs = tuple(flight.inputs[value.name] for value in taken)
        with explaining_type_errors(self.stage.module, inputs):
            given = self.stage.module(*inputs)
        return {value.name: tensor for value, tensor in zip(returned, given)}

    def _run_again(self, flight: InFlight) -> None:
        """Recompute the forward with gradients, from the module state before the first forward."""
        for weights, version in zip(self.versions, flight.versions):
            weights.put(version)
        assert flight.before is not None
        now = self._memory.capture(copies=False)
        self._memory.put(flight.before)
        self._run(flight)
        flight.free_outputs()
        self._memory.put(now)
        flight.before = None
