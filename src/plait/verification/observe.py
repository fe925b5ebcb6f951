"""Observations of a model on a batch: outputs, loss, gradients and buffers, by name."""

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

# By name, in the order of computation; None is a missing gradient.
Observation = Mapping[str, Tensor | None]
# Prefixes of the names of an observation.
GRADIENT, BUFFER = "the gradient of ", "the buffer "


@dataclass(frozen=True)
class RandomState:
    """The state of the random number generators of Python, numpy, torch, and of GPUs in use."""

    python: Any
    numpy: Any
    cpu: Tensor
    gpus: tuple[Tensor, ...]

    @staticmethod
    def now() -> RandomState:
        # Reading the state of unused GPUs would initialize them.
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return RandomState(
            random.getstate(), numpy.random.get_state(legacy=True), torch.get_rng_state(), tuple(gpus)
        )

    def packed(self) -> Tensor:
        """The state as bytes, to be sent to another worker; of GPUs, only the current one."""
        python, (kind, keys, *rest) = self.python, self.numpy
        gpu = self.gpus[torch.cuda.current_device()].tolist() if self.gpus else None
        content = [python, [kind, keys.tolist(), *rest], self.cpu.tolist(), gpu]
        return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)

    @staticmethod
    def unpacked(content: Tensor) -> RandomState:
        (version, keys, gauss), numpy_state, cpu, gpu = json.loads(content.cpu().numpy().tobytes())
        gpus = () if gpu is None else (_state(gpu),) * torch.cuda.device_count()
        return RandomState((version, tuple(keys), gauss), tuple(numpy_state), _state(cpu), gpus)

    def equals(self, other: RandomState) -> bool:
        """Whether the two states are equal."""
        tensors = zip((self.cpu, *self.gpus), (other.cpu, *other.gpus))
        alike = len(self.gpus) == len(other.gpus) and all(torch.equal(a, b) for a, b in tensors)
        (_, keys, *rest), (_, other_keys, *other_rest) = self.numpy, other.numpy
        same_numpy = numpy.array_equal(keys, other_keys) and rest == other_rest
        return alike and self.python == other.python and same_numpy

    def restore(self) -> None:
        """Set all generators to this state."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.gpus:
            torch.cuda.set_rng_state_all(list(self.gpus))
        elif torch.cuda.is_available():
            # They were unused at that time, and would have started with torch's seed.
            torch.cuda.manual_seed_all(torch.initial_seed())


def _state(content: list[int]) -> Tensor:
    return torch.tensor(content, dtype=torch.uint8)


@contextlib.contextmanager
def unchanged_random_numbers() -> Iterator[None]:
    """Context after which the generators of torch, numpy and Python are restored."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def same_random_numbers(seed: int) -> Iterator[None]:
    """Context in which torch, numpy and Python are seeded with `seed`; then they are restored."""
    with unchanged_random_numbers():
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        yield


def observe_outputs(outputs: Any) -> dict[str, Tensor]:
    """The tensors and numbers in a model's output, by their path."""
    observation = {}
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, Tensor):
            observation[f"output{pytree.keystr(path)}"] = leaf.detach().clone()
        elif isinstance(leaf, (bool, int, float)):
            observation[f"output{pytree.keystr(path)}"] = torch.tensor(leaf)
    return observation


def copied_gradient(gradient: Tensor | None) -> Tensor | None:
    """A dense copy of a gradient, or None."""
    return None if gradient is None else gradient.detach().to_dense(masked_grad=False).clone()


def observe_step(
    model: nn.Module, forward: Callable[[], tuple[Any, Tensor | None]], backward: bool = True
) -> dict[str, Tensor | None]:
    """Observe `forward`, which returns (outputs, loss), and backward: these, gradients and buffers.

    Earlier gradients are dropped, the new ones are kept; weights are not updated. Without `backward` the loss
    may be missing, and gradients are not included.
    """
    for parameter in model.parameters():
        parameter.grad = None
    with torch.set_grad_enabled(backward):
        outputs, loss = forward()
    observation: dict[str, Tensor | None] = dict(observe_outputs(outputs))
    if loss is not None:
        observation["the loss"] = loss.detach().clone()
        if backward and loss.requires_grad:
            loss.backward()
    if backward:
        for name, parameter in model.named_parameters():
            observation[f"{GRADIENT}{name}"] = copied_gradient(parameter.grad)
    for name, buffer in model.named_buffers():
        observation[f"{BUFFER}{name}"] = buffer.detach().clone()
    return observation


def first_names(model: nn.Module) -> dict[str, str]:
    """Maps each name of a parameter or buffer to its first name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
