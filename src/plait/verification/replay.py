"""A step taken a second time as plain PyTorch takes it: forward, loss and backward of a model made anew."""

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

from plait.data.batches import seed_all
from plait.data.calling import forward
from plait.verification.attributes import Attributes, load_attributes, read_attributes
from plait.verification.observe import RandomState

Named = dict[str, Tensor]
LOSS = "loss function"


@dataclass(frozen=True)
class Part:
    """One forward and backward of a step: a batch or a microbatch, and the weight of its loss in the step's.

    Random numbers start from `seed`, from `random_state`, or go on from the part before. `number` is that of
    a microbatch. Once all are done, gradients and loss are multiplied by `share`, that of their worker.
    """

    inputs: Any
    target: Any
    weight: float = 1.0
    seed: int | None = None
    number: int = 0
    random_state: RandomState | None = None
    share: float = 1.0

    def own(self) -> Part:
        """The part in memory of its own: a forward may write into what it is given."""
        inputs, target = pytree.tree_map_only(Tensor, _copy, (self.inputs, self.target))
        return replace(self, inputs=inputs, target=target)


@dataclass(frozen=True)
class State:
    """What a model and its loss hold: parameters and buffers by their first names, and Python attributes."""

    tensors: Mapping[str, Tensor]
    attributes: Attributes

    def own(self) -> State:
        """The state in memory of its own."""
        return State({name: _copy(tensor) for name, tensor in self.tensors.items()}, self.attributes)


@dataclass(frozen=True)
class FreshModel:
    """A model and its loss as their factories make them, and what is around each forward."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]


@dataclass
class PlainModel:
    """A model and its loss, and how plain PyTorch trains them.

    `autocast` is around each forward, and `scale` takes the loss before backward. A loss that is a module
    has parameters and buffers, too, whose names begin with `loss function`.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    scale: Callable[[Tensor], Tensor] = lambda loss: loss

    def __post_init__(self) -> None:
        # Parts that the factory leaves in evaluation mode stay there; of a whole model no loop would have it.
        modules = self.model.modules() if self.model.training else ()
        self._evaluated = [module for module in modules if not module.training]
        self._does_more = any(type(module).train is not nn.Module.train for module in self.model.modules())
        # To look for parameters and buffers takes torch a while.
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
        """What the modules hold, each under its first name."""
        found: dict[int, tuple[str, Any]] = {}
        for path, module in self._modules:
            for name, each in held(module).items():
                if each is not None:
                    found.setdefault(id(each), (f"{path}{name}", each))
        return dict(found.values())

    def buffers_left(self) -> Named:
        """What forward has left in buffers, by the names that they are compared under."""
        return self.buffers()

    def zero_grad(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    def state(self) -> State:
        """What they hold now; the tensors are theirs."""
        tensors = {name: t.detach() for name, t in self.tensors().items()}
        return State(tensors, read_attributes(self.objects))

    def load(self, state: State) -> None:
        """Hold what another model held."""
        own = self.tensors()
        with torch.no_grad():
            for name, value in state.tensors.items():
                target = own.get(name)
                if isinstance(target, (UninitializedParameter, UninitializedBuffer)):
                    target.materialize(value.shape)
                if target is not None and target.shape == value.shape:
                    target.copy_(value)
                else:
                    self._replace(name, value)
        load_attributes(self.objects, state.attributes.values)
        # As every loop calls it after an evaluation: some models merge, swap or freeze weights in it.
        self.model.train()
        for module in self._evaluated:
            module.training = False
        if self._does_more and self._holds(state.tensors):
            # The other model was in this mode already: what it counted there counts once.
            load_attributes(self.objects, state.attributes.values)

    def _holds(self, tensors: Mapping[str, Tensor]) -> bool:
        own = self.tensors()
        return all(torch.equal(own[name], value) for name, value in tensors.items() if name in own)

    def _replace(self, name: str, value: Tensor) -> None:
        """Hold a buffer that forward has made, or made anew with another shape."""
        root = self.loss if name.startswith(f"{LOSS}.") else self.model
        owner, _, last = name.removeprefix(f"{LOSS}.").rpartition(".")
        assert isinstance(root, nn.Module)
        root.get_submodule(owner)._buffers[last] = _copy(value)

    def step(self, parts: Sequence[Part]) -> Tensor:
        """The weighted loss of all parts, whose gradients are left on the parameters."""
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
        """Add the gradients of one part to those there are; its weighted loss."""
        if part.seed is not None:
            seed_all(part.seed)
        elif part.random_state is not None:
            part.random_state.restore()
        own = part.own()
        with self.autocast():
            loss = self.loss(forward(self.model, own.inputs), own.target) * part.weight
        self.scale(loss).backward()
        return loss.detach().double().cpu()

    @functools.cached_property
    def objects(self) -> dict[str, Any]:
        """The modules that keep attributes, by their paths, and a loss that is an object."""
        found: dict[str, Any] = {}
        for prefix, root in self._roots():
            found |= {f"{prefix}{path}".rstrip("."): each for path, each in keeping_attributes(root).items()}
        if hasattr(self.loss, "__dict__") and not hasattr(self.loss, "__code__"):
            found.setdefault(LOSS, self.loss)
        return found

    def _roots(self) -> Iterator[tuple[str, nn.Module]]:
        yield "", self.model
        if isinstance(self.loss, nn.Module):
            yield f"{LOSS}.", self.loss


def keeping_attributes(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by path, whose forward may keep something in Python: all but torch's own layers."""
    return {
        path: module
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.modules.")
    }


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
