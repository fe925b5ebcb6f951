"""The base class of our autograd functions, whose arguments are plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as autograd


class PlainFunction(torch.autograd.Function):
    """Applied without the patches that users' functions have in a fused forward, and without torch's search.

    Torch looks through the arguments for leftovers of its transforms, which ours are not called with.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(autograd._SingleLevelFunction, cls).apply(*args)  # type: ignore[misc]


def gradients_again(
    outputs: Any, inputs: Sequence[Tensor | None], asked: Sequence[bool], of_outputs: Any
) -> list[Tensor | None]:
    """The gradients of inputs that are `asked` for, to be differentiated again; None for the others."""
    some = [part for part, is_asked in zip(inputs, asked) if is_asked and part is not None]
    found = iter(torch.autograd.grad(outputs, some, of_outputs, create_graph=True))
    return [next(found) if is_asked else None for _, is_asked in zip(inputs, asked)]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's decorator of this name, which costs nothing where no gradient is differentiated again."""
    refused_again = autograd.once_differentiable(backward)

    @wraps(backward)
    def either(ctx: Any, *gradients: Any) -> Any:
        return (refused_again if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return either
