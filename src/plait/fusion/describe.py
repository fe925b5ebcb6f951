"""What a value is, in a form that can be compared: attributes of models that are to be fused."""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Hashable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    range,
    slice,
)
_DEEPEST = 12


def describe(value: Any) -> Hashable:
    """Equal for values that act alike: containers by their parts, functions by code and what they close over.

    Objects are described by their class and attributes. Of what cannot be looked into only the class counts.
    """
    return _describe(value, {}, 0)


def _describe(value: Any, seen: dict[int, int], depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, enum.Enum):
        return (type(value).__qualname__, value.name)
    if isinstance(value, type):
        return ("class", value.__module__, value.__qualname__)
    if id(value) in seen or depth > _DEEPEST:
        return ("again", seen.get(id(value), -1))
    seen[id(value)] = len(seen)

    def inner(part: Any) -> Hashable:
        return _describe(part, seen, depth + 1)

    kind = type(value).__qualname__
    if isinstance(value, Tensor):
        return (kind, *_tensor(value))
    if isinstance(value, numpy.ndarray):
        return (kind, value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest())
    if isinstance(value, torch.Generator):
        return (kind, hashlib.sha256(value.get_state().numpy().tobytes()).hexdigest())
    if isinstance(value, Mapping):
        return (kind, *((inner(key), inner(part)) for key, part in value.items()))
    if isinstance(value, (list, tuple)):
        return (kind, *(inner(part) for part in value))
    if isinstance(value, (set, frozenset)):
        return (kind, *sorted((inner(part) for part in value), key=repr))
    if isinstance(value, functools.partial):
        return (kind, inner(value.func), inner(value.args), inner(value.keywords))
    if isinstance(value, types.MethodType):
        return (kind, inner(value.__func__), type(value.__self__).__qualname__)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        return (
            kind, value.__module__, value.__qualname__, *_code(value.__code__), inner(tuple(cells)),
            inner(value.__defaults__), inner(value.__kwdefaults__),
        )  # fmt: skip
    if isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
        return (kind, getattr(value, "__module__", None), value.__name__)
    if isinstance(value, nn.Module):
        # A module that the tree of modules knows is compared there.
        return ("module", kind)
    if hasattr(value, "__dict__") and not isinstance(value, RemovableHandle):  # a number of torch's own
        return (kind, *((name, inner(part)) for name, part in sorted(vars(value).items())))
    return (kind,)


def _code(code: types.CodeType) -> tuple[Hashable, ...]:
    """What a function does, without where in memory its parts lie."""
    constants = tuple(_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, constants


def _tensor(value: Tensor) -> tuple[Hashable, ...]:
    about = (tuple(value.shape), str(value.dtype))
    if value.is_meta or value.is_sparse or value.numel() == 0:
        return about
    try:
        content = value.detach().cpu().contiguous().view(torch.uint8 if value.dim() else value.dtype)
        return (*about, hashlib.sha256(content.numpy().tobytes()).hexdigest())
    except (RuntimeError, TypeError, NotImplementedError, AssertionError):  # a kind that has no bytes
        return about


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
