"""What a model does with a batch: outputs, loss, gradients and buffers, each under a name."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# By name, in the order in which a model comes to them; None is a gradient that there is not.
Observation = Mapping[str, Tensor | None]
# What the names of an observation begin with.
GRADIENT, BUFFER = "the gradient of ", "the buffer "


@dataclass(frozen=True)
class RandomState:
    """Where the random numbers of Python, numpy and torch stand; of GPUs where they are in use."""

    python: Any
    numpy: Any
    cpu: Tensor
    gpus: tuple[Tensor, ...]

    @staticmethod
    def now() -> RandomState:
        # Asking GPUs that are not in use would start them.
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return RandomState(
            random.getstate(), numpy.random.get_state(legacy=True), torch.get_rng_state(), tuple(gpus)
        )

    def packed(self) -> Tensor:
        """As bytes, to be sent to another worker; of GPUs, that of the one in use."""
        python, (kind, keys, *rest) = self.python, self.numpy
        gpu = self.gpus[torch.cuda.current_device()].tolist() if self.gpus else None
        content = [python, [kind, keys.tolist(), *rest], self.cpu.tolist(), gpu]
        return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)

    @staticmethod
    def unpacked(content: Tensor) -> RandomState:
        (version, keys, gauss), own, cpu, gpu = json.loads(content.cpu().numpy().tobytes())
        gpus = () if gpu is None else (_state(gpu),) * torch.cuda.device_count()
        return RandomState((version, tuple(keys), gauss), tuple(own), _state(cpu), gpus)

    def equals(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        tensors = zip((self.cpu, *self.gpus), (other.cpu, *other.gpus))
        alike = len(self.gpus) == len(other.gpus) and all(torch.equal(a, b) for a, b in tensors)
        # Of numpy's the place in its numbers is part of the text.
        return alike and self.python == other.python and str(self.numpy) == str(other.numpy)

    def restore(self) -> None:
        """Continue all random numbers from here."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.gpus:
            torch.cuda.set_rng_state_all(list(self.gpus))
        elif torch.cuda.is_available():
            # They were not in use then, and would have begun with torch's seed.
            torch.cuda.manual_seed_all(torch.initial_seed())


def _state(content: list[int]) -> Tensor:
    return torch.tensor(content, dtype=torch.uint8)


@contextlib.contextmanager
def unchanged_random_numbers() -> Iterator[None]:
    """Afterwards torch, numpy and Python draw what they would have drawn without what happens within."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def same_random_numbers(seed: int) -> Iterator[None]:
    """Within, torch, numpy and Python draw what follows `seed`; afterwards they go on as before."""
    with unchanged_random_numbers():
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        yield


def observe_outputs(outputs: Any) -> dict[str, Tensor]:
    """The tensors and numbers that a model returned, by where they are."""
    found = {}
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, Tensor):
            found[f"output{pytree.keystr(path)}"] = leaf.detach().clone()
        elif isinstance(leaf, (bool, int, float)):
            found[f"output{pytree.keystr(path)}"] = torch.tensor(leaf)
    return found


def copied_gradient(gradient: Tensor | None) -> Tensor | None:
    """A gradient in memory of its own, dense; None where there is none."""
    return None if gradient is None else gradient.detach().to_dense(masked_grad=False).clone()


def observe_step(
    model: nn.Module, forward: Callable[[], tuple[Any, Tensor | None]], backward: bool = True
) -> dict[str, Tensor | None]:
    """What `forward` gives, as (outputs, loss), and what it and the loss's backward leave in `model`.

    The gradients of before are dropped, the new ones stay; weights are not updated. Without `backward`
    the loss may be missing, and no gradients are noted.
    """
    for parameter in model.parameters():
        parameter.grad = None
    with torch.set_grad_enabled(backward):
        outputs, loss = forward()
    found: dict[str, Tensor | None] = dict(observe_outputs(outputs))
    if loss is not None:
        found["the loss"] = loss.detach().clone()
        if backward and loss.requires_grad:
            loss.backward()
    if backward:
        for name, parameter in model.named_parameters():
            found[f"{GRADIENT}{name}"] = copied_gradient(parameter.grad)
    for name, buffer in model.named_buffers():
        found[f"{BUFFER}{name}"] = buffer.detach().clone()
    return found


def first_names(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter or buffer, the first that it has."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
