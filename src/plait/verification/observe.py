"""What a model does with a batch: outputs, loss, gradients and buffers, each under a name."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# By name, in the order in which a model comes to them; None is a gradient that there is not.
Observation = Mapping[str, Tensor | None]


@contextlib.contextmanager
def same_random_numbers(seed: int) -> Iterator[None]:
    """Within, torch, numpy and Python draw what follows `seed`; afterwards they go on as before."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)


def observe_outputs(outputs: Any) -> dict[str, Tensor]:
    """The tensors and numbers that a model returned, by where they are."""
    found = {}
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, Tensor):
            found[f"output{pytree.keystr(path)}"] = leaf.detach().clone()
        elif isinstance(leaf, (bool, int, float)):
            found[f"output{pytree.keystr(path)}"] = torch.tensor(leaf)
    return found


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
            gradient = parameter.grad
            found[f"the gradient of {name}"] = None if gradient is None else gradient.detach().clone()
    for name, buffer in model.named_buffers():
        found[f"the buffer {name}"] = buffer.detach().clone()
    return found
