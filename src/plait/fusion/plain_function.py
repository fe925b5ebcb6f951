"""The base class of our autograd functions, whose arguments are plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
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


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's decorator of this name, which costs nothing where no gradient is differentiated again."""
    refused_again = autograd.once_differentiable(backward)

    @wraps(backward)
    def either(ctx: Any, *gradients: Any) -> Any:
        return (refused_again if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return either
