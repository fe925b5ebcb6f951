"""Parts of a tensor on a GPU, as of the queries, keys and values of attention in one product.

As autograd would have it, their gradients are stacked in a new order, number by number, and that is copied
into the order of the whole. Here each is copied once to its place, 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.alias_links import is_dense
from plait.fusion.kernels import can_run_on
from plait.fusion.plain_function import PlainFunction

# Below, copies cost less than to think about them.
_LEAST_ELEMENTS = 1 << 18
_MOST_PARTS = 8
Cut = Callable[[Tensor], Sequence[Tensor]]


class _Parts(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like = x.shape, x.stride(), {"dtype": x.dtype, "device": x.device}
        ctx.cut = cut
        return tuple(cut(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        shape, strides, options = ctx.like
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            whole = torch.zeros(shape, **options)
            for part, gradient in zip(ctx.cut(whole), gradients):
                if gradient is not None:
                    whole = whole + _placed(part, gradient, whole)
            return whole, None
        whole = torch.empty_strided(shape, strides, **options)
        parts = ctx.cut(whole)
        if sum(part.numel() for part in parts) < whole.numel():
            whole.zero_()
        elif (joined := _already_joined(parts, gradients, whole)) is not None:
            return joined, None
        for part, gradient in zip(parts, gradients):
            part.zero_() if gradient is None else copy_words(part, gradient)
        return whole, None


def _already_joined(
    parts: Sequence[Tensor], gradients: Sequence[Tensor | None], whole: Tensor
) -> Tensor | None:
    """The tensor of which the gradients are the parts, as attention makes them; None if they are not."""
    first = gradients[0]
    if first is None or first.untyped_storage().nbytes() != whole.untyped_storage().nbytes():
        return None
    for part, gradient in zip(parts, gradients):
        if gradient is None or gradient.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if (gradient.stride(), gradient.storage_offset()) != (part.stride(), part.storage_offset()):
            return None
    return first.as_strided(whole.shape, whole.stride(), 0)


def _placed(part: Tensor, gradient: Tensor, whole: Tensor) -> Tensor:
    """`gradient` in the place of `part` in zeros like `whole`."""
    return torch.zeros_like(whole).as_strided_scatter(
        gradient, part.size(), part.stride(), part.storage_offset()
    )


def copy_words(to: Tensor, of: Tensor) -> None:
    """Copy in words of 16 bytes where both tensors have such."""
    step = 16 // to.element_size()
    if all(_has_words(tensor, step) for tensor in (to, of)) and to.dtype == of.dtype:
        to, of = to.view(torch.complex128), of.view(torch.complex128)
    to.copy_(of)


def _has_words(tensor: Tensor, step: int) -> bool:
    numbers = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.dim() > 0 and tensor.stride(-1) == 1 and all(number % step == 0 for number in numbers)


def parts_of(x: Tensor, cut: Cut) -> Sequence[Tensor]:
    """`cut(x)`, views of x; its gradients are put together fast where x is large and on a GPU."""
    large = x.numel() >= _LEAST_ELEMENTS and x.requires_grad and torch.is_grad_enabled()
    if not large or not can_run_on(x) or not is_dense(x):
        return cut(x)
    with torch.no_grad():
        if len(cut(x)) > _MOST_PARTS:
            return cut(x)
    parts: tuple[Tensor, ...] = _Parts.apply(x, cut)
    return parts
