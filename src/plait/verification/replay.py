"""Repeats a step in plain PyTorch: forward, loss and backward of a newly built model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree as pytree

from plait.data.call_model import forward
from plait.data.seeding import seed_all
from plait.verification.attributes import Attributes, load_attributes, read_attributes
from plait.verification.observe import RandomState

Named = dict[str, Tensor]
LOSS = "loss function"


@dataclass(frozen=True)
class Part:
    """One forward and backward of a step: a batch or a microbatch, and the weight of its loss in the step.

    Random numbers start from `seed`, from `random_state`, or continue from the previous part. `number` is
    that of a microbatch. In the end, gradients and loss are multiplied by `share`, the factor of their
    worker.
    """

    inputs: Any
    target: Any
    weight: float = 1.0
    seed: int | None = None
    number: int = 0
    random_state: RandomState | None = None
    share: float = 1.0

    def copied(self) -> Part:
        """A copy of the part, as a forward may write to its inputs."""
        inputs, target = pytree.tree_map_only(Tensor, _copy, (self.inputs, self.target))
        return replace(self, inputs=inputs, target=target)


@dataclass(frozen=True)
class State:
    """The state of a model and its loss: parameters and buffers by first name, and Python attributes."""

    tensors: Mapping[str, Tensor]
    attributes: Attributes

    def copied(self) -> State:
        """A copy of the state."""
        return State({name: _copy(tensor) for name, tensor in self.tensors.items()}, self.attributes)


@dataclass
class PlainModel:
    """A model and its loss, and how plain PyTorch trains them.

    `autocast` is active in each forward, and `scale` is applied to the loss before backward. A loss that is a
    module has parameters and buffers too, whose names begin with `loss function`.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    scale: Callable[[Tensor], Tensor] = lambda loss: loss

    def __post_init__(self) -> None:
        # Submodules that the factory leaves in evaluation mode stay in it; a whole model would not.
        modules = self.model.modules() if self.model.training else ()
        self._evaluated = [module for module in modules if not module.training]
        self._does_more = any(type(module).train is not nn.Module.train for module in self.model.modules())
        # Cached, as listing parameters and buffers is slow.
        self._modules = [
            (f"{prefix}{path}.".lstrip("."), module)
            for prefix, root in self._roots()
            for path, module in root.named_modules()
        ]

    def parameters(self) -> dict[str, Parameter]:
        return self._named(lambda module: module._parameters)

    def buffers(self) -> Named:
        return self._named(lambda module: module._buffers)

    def tensors(self) -> dict[str, Any]:
        """Parameters and buffers."""
        return self._named(lambda module: {**module._parameters, **module._buffers})

    def _named(self, held: Callable[[nn.Module], Mapping[str, Any]]) -> dict[str, Any]:
        """The tensors of the modules, each under its first name."""
        named: dict[int, tuple[str, Any]] = {}
        for path, module in self._modules:
            for name, each in held(module).items():
                if each is not None:
                    named.setdefault(id(each), (f"{path}{name}", each))
        return dict(named.values())

    def buffers_left(self) -> Named:
        """The buffers after forward, by the names for comparison."""
        return self.buffers()

    def zero_grad(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    def state(self) -> State:
        """The current state; tensors are not copied."""
        tensors = {name: t.detach() for name, t in self.tensors().items()}
        return State(tensors, read_attributes(self.objects))

    def load(self, state: State) -> None:
        """Load the state of another model."""
        tensors = self.tensors()
        with torch.no_grad():
            for name, value in state.tensors.items():
                target = tensors.get(name)
                if isinstance(target, (UninitializedParameter, UninitializedBuffer)):
                    target.materialize(value.shape)
                if target is not None and target.shape == value.shape:
                    target.copy_(value)
                else:
                    self._replace(name, value)
        load_attributes(self.objects, state.attributes.values)
        # As training loops do after an evaluation; some models merge, swap or freeze weights in train().
        self.model.train()
        for module in self._evaluated:
            module.training = False
        if self._does_more and self._holds(state.tensors):
            # After train(), as the other model had called it already.
            load_attributes(self.objects, state.attributes.values)

    def _holds(self, tensors: Mapping[str, Tensor]) -> bool:
        held = self.tensors()
        return all(torch.equal(held[name], value) for name, value in tensors.items() if name in held)

    def _replace(self, name: str, value: Tensor) -> None:
        """Set a buffer that forward has created, or replaced with another shape."""
        root = self.loss if name.startswith(f"{LOSS}.") else self.model
        owner, _, last = name.removeprefix(f"{LOSS}.").rpartition(".")
        assert isinstance(root, nn.Module)
        root.get_submodule(owner)._buffers[last] = _copy(value)

    def step(self, parts: Sequence[Part]) -> Tensor:
        """The weighted loss of all parts; gradients are accumulated on the parameters."""
        self.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            total += self.backward(part)
        share = parts[0].share if parts else 1.0
        for parameter in self.parameters().values() if share != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(share)
        return total * share

    def backward(self, part: Part) -> Tensor:
        """Accumulate the gradients of one part; returns its weighted loss."""
        if part.seed is not None:
            seed_all(part.seed)
        elif part.random_state is not None:
            part.random_state.restore()
        copied = part.copied()
        with self.autocast():
            loss = self.loss(forward(self.model, copied.inputs), copied.target) * part.weight
        self.scale(loss).backward()
        return loss.detach().double().cpu()

    @functools.cached_property
    def objects(self) -> dict[str, Any]:
        """The modules that may have state in attributes, by path, and a loss that is an object."""
        objects: dict[str, Any] = {}
        for prefix, root in self._roots():
            objects |= {
                f"{prefix}{path}".rstrip("."): each for path, each in keeping_attributes(root).items()
            }
        if hasattr(self.loss, "__dict__") and not hasattr(self.loss, "__code__"):
            objects.setdefault(LOSS, self.loss)
        return objects

    def _roots(self) -> Iterator[tuple[str, nn.Module]]:
        yield "", self.model
        if isinstance(self.loss, nn.Module):
            yield f"{LOSS}.", self.loss


def keeping_attributes(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by path, whose forward may keep Python state: all except torch's layers."""
    return {
        path: module
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.modules.")
    }


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
