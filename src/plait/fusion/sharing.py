"""Which tensors of K models are held once: a frozen base that all of them have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

from plait.core.units import show_bytes
from plait.fusion.errors import FusionError

SHARE = ("auto", "parameters", "same-storage", "never")
# Values are compared in pieces of this many elements, so that those of unlike tensors are not all read.
_AT_ONCE = 1 << 22
_FIRST = 1 << 12


def check_share(share: str) -> None:
    """Raise FusionError for a value of `share` that there is not."""
    if share not in SHARE:
        raise FusionError(
            f"fuse: found share={share!r}, expected 'auto' (frozen tensors with equal values are held once), "
            f"'parameters' (buffers are not), 'same-storage' (those that are one tensor in all models), or "
            f"'never'"
        )


def held_once(models: Sequence[nn.Module], share: str = "auto") -> set[str]:
    """The names of the parameters and buffers of which all models have the same, so that one is enough."""
    if share == "never":
        return set()
    known: dict[tuple[int, ...], bool] = {}
    names = set()
    for name, every, part in _tensors(models):
        if _can_change(every, part) or (share == "parameters" and not isinstance(every[0], nn.Parameter)):
            continue
        key = tuple(map(id, every))
        if key not in known:
            known[key] = all(_is_same(every[0], other, share) for other in every[1:])
        if known[key]:
            names.add(name)
    return names


def nearly_shared(models: Sequence[nn.Module], shared: set[str]) -> list[str]:
    """The names of frozen parameters that differ between models that share other tensors."""
    return [
        name
        for name, every, part in _tensors(models)
        if isinstance(every[0], nn.Parameter) and name not in shared and not _can_change(every, part)
    ]


def _tensors(models: Sequence[nn.Module]) -> Iterator[tuple[str, list[Tensor], nn.Module]]:
    """The name of each parameter and buffer, the tensors of all models, and the first model's submodule."""
    parts = [dict(model.named_modules()) for model in models]
    for path, part in parts[0].items():
        for kind in ("_parameters", "_buffers"):
            for name, _ in getattr(part, kind).items():
                every = [getattr(other[path], kind)[name] for other in parts]
                if all(isinstance(tensor, Tensor) for tensor in every):
                    yield f"{path}.{name}" if path else name, every, part


def _can_change(every: Sequence[Tensor], part: nn.Module) -> bool:
    """Whether training may change the tensors, so that each trial needs its own."""
    if any(tensor.requires_grad or tensor._backward_hooks for tensor in every):
        return True
    if isinstance(part, _NormBase) and not isinstance(every[0], nn.Parameter):
        return part.training or part.momentum is None
    # Scripted modules run trial by trial, and a lookup with a norm limit writes to its table.
    return isinstance(part, torch.jit.ScriptModule) or getattr(part, "max_norm", None) is not None


def _is_same(one: Tensor, other: Tensor, share: str) -> bool:
    if one is other or is_same_view(one, other):
        return True
    return share != "same-storage" and type(one) is type(other) and equal_values(one, other)


def is_same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements of one memory."""
    if any(x.is_meta or isinstance(x, FakeTensor) for x in (one, other)):
        return False
    return _form(one) == _form(other) and one.data_ptr() == other.data_ptr() and one.numel() > 0


def _form(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def equal_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, device and values; fake tensors never have."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if any(x.is_meta or isinstance(x, FakeTensor) for x in (one, other)):
        return False
    with torch.no_grad(), _disable_current_modes():
        flat, others = one.detach().reshape(-1), other.detach().reshape(-1)
        ends = [min(_FIRST, len(flat)), *range(_FIRST + _AT_ONCE, len(flat) + _AT_ONCE, _AT_ONCE)]
        start = 0
        for end in ends:
            if not torch.equal(flat[start:end], others[start:end]):
                return False
            start = end
    return True


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """The bytes of tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def describe_sharing(shared: Sequence[Tensor], others: Sequence[Tensor], trials: int, unlike: str) -> str:
    """What is held once, and what each trial adds, in a line."""
    each = show_bytes(bytes_of(others) // trials)
    if not shared:
        return f"{trials} trials of {each}, nothing held once{unlike}"
    count = len({id(tensor) for tensor in shared})
    tensors = f"{count} tensor{'s' if count > 1 else ''}"
    base = f"base: {show_bytes(bytes_of(shared))} held once, {tensors}"
    return f"{base}; per trial {each}, {trials} trials{unlike}"
