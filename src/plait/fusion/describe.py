"""Comparable descriptions of values, to compare attributes of models that are to be fused."""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Set
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plait.verification.attributes import is_full
from plait.verification.python_values import slots_of_class

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    type(NotImplemented),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    range,
    slice,
)
# All values of these types are treated as equal: a model does not compute with them.
_ALL_ALIKE = (RemovableHandle, type(threading.Lock()), type(threading.RLock()))
_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
# Class attributes that do not affect instances.
_OF_CLASSES = frozenset(
    (
        "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "_abc_impl",
        "__firstlineno__", "__static_attributes__", "__dataclass_params__", "__slotnames__",
    )
)  # fmt: skip
# Type flag of classes created by a class statement, not built into Python or a library.
_MADE_AT_RUN_TIME = 1 << 9
_DEEPEST = 24


def describe(value: Any, tree: Mapping[int, str] | None = None) -> Hashable:
    """Equal for values that behave alike: containers by items, functions by code and closure.

    Importable classes are described by name, others by content; objects by class and attributes, or by what
    pickle would store. An opaque value equals only itself. Modules whose ids are in `tree` are described by
    their name there, since they are compared separately.
    """
    return _Description(tree or {}).of(value, 0)


class _Description:
    """One traversal of a value and all that it refers to."""

    def __init__(self, tree: Mapping[int, str]) -> None:
        self._tree = tree
        self._seen: dict[int, int] = {}
        # Kept alive so that no id is reused during the traversal.
        self._held: list[Any] = []
        # How many classes the traversal is currently inside of.
        self._classes = 0

    def of(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value))
        if isinstance(value, enum.Enum):
            return (type(value).__qualname__, value.name)
        if id(value) in self._tree:
            return ("module", self._tree[id(value)])
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        if depth > _DEEPEST:
            return _Itself(value)
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        return self._within(value, lambda part: self.of(part, depth + 1))

    def _within(self, value: Any, inner: Callable[[Any], Hashable]) -> Hashable:
        if isinstance(value, type):
            self._classes += 1
            described = _class(value, inner)
            self._classes -= 1
            return described
        kind = inner(type(value))
        if isinstance(value, Tensor):
            # torch.nn.utils.parametrize creates a class per module, whose functions refer to that module.
            return (kind, *_tensor(value, with_values=self._classes == 0))
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            if value.dtype.hasobject:
                return (kind, value.shape, inner(value.tolist()))
            return (kind, value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest())
        if isinstance(value, torch.Generator):
            return (kind, hashlib.sha256(value.get_state().numpy().tobytes()).hexdigest())
        if isinstance(value, _ALL_ALIKE):
            return kind
        if isinstance(value, weakref.ReferenceType):
            return (kind, inner(value()))
        if isinstance(value, Mapping):
            content = tuple((inner(key), inner(part)) for key, part in value.items())
            factory = inner(getattr(value, "default_factory", None))
            return (kind, content, factory, _attributes(value, inner))
        if isinstance(value, (list, tuple)):
            return (kind, tuple(inner(part) for part in value), _attributes(value, inner))
        if isinstance(value, Set):
            return (kind, *sorted((inner(part) for part in value), key=repr))
        if (known := _callable(value, kind, inner)) is not None:
            return known
        if isinstance(value, nn.Module):  # not in the tree of modules
            return (kind, _attributes(value, inner))
        return _object(value, kind, inner)


class _Itself:
    """An opaque value, which equals only itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:  # unique while the value is alive
        return f"{type(self._value).__qualname__} at {id(self._value)}"


def _class(value: type, inner: Callable[[Any], Hashable]) -> Hashable:
    """A class by its name if it can be imported by it, else by all that it defines."""
    reached: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        reached = getattr(reached, name, None)
    if reached is value or not value.__flags__ & _MADE_AT_RUN_TIME:
        return ("class", value.__module__, value.__qualname__)
    content = [(n, inner(part)) for n, part in sorted(vars(value).items()) if n not in _OF_CLASSES]
    return ("class", value.__module__, value.__qualname__, inner(value.__bases__), *content)


def _callable(value: Any, kind: Hashable, inner: Callable[[Any], Hashable]) -> Hashable | None:
    if isinstance(value, functools.partial):
        return (kind, inner(value.func), inner(value.args), inner(value.keywords))
    if isinstance(value, types.MethodType):
        return (kind, inner(value.__func__), inner(value.__self__))
    if isinstance(value, (staticmethod, classmethod)):
        return (kind, inner(value.__func__))
    if isinstance(value, property):
        return (kind, inner(value.fget), inner(value.fset), inner(value.fdel))
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_full(cell)]
        return (
            kind, value.__module__, value.__qualname__, *_code(value.__code__), inner(tuple(cells)),
            inner(value.__defaults__), inner(value.__kwdefaults__),
        )  # fmt: skip
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        bound_to = None if isinstance(owner, (types.ModuleType, type)) else inner(owner)
        return (kind, getattr(value, "__module__", None), value.__qualname__, bound_to)
    if isinstance(value, types.ModuleType):
        return (kind, value.__name__)
    if isinstance(value, _DESCRIPTORS):
        return (kind, value.__objclass__.__qualname__, value.__name__)
    return None


def _object(value: Any, kind: Hashable, inner: Callable[[Any], Hashable]) -> Hashable:
    """An object by its attributes and by what pickle would store, as some keep state outside attributes."""
    named = _attributes(value, inner)
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # pickling may raise anything
        return _Itself(value)
    if isinstance(reduced, str):
        return (kind, named, reduced)
    make, args, *rest = reduced
    return (kind, named, inner(make), inner(args), *(inner(_listed(part)) for part in rest))


def _listed(part: Any) -> Any:
    """The items of an iterator that pickle would read; anything else unchanged."""
    return list(part) if hasattr(part, "__next__") else part


def _attributes(value: Any, inner: Callable[[Any], Hashable]) -> tuple[Hashable, ...]:
    """The attributes of an object, in its `__dict__` or in slots."""
    named = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for name in slots_of_class(type(value)):
        if hasattr(value, name):
            named[name] = getattr(value, name)
    return tuple((name, inner(part)) for name, part in sorted(named.items(), key=lambda pair: str(pair[0])))


def _code(code: types.CodeType) -> tuple[Hashable, ...]:
    """The code of a function, without memory addresses."""
    constants = tuple(_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, constants


def _tensor(value: Tensor, with_values: bool) -> tuple[Hashable, ...]:
    about = (tuple(value.shape), str(value.dtype), str(value.layout))
    if value.is_meta or value.numel() == 0 or not with_values:
        return about
    try:
        plain = value.detach().cpu()
        parts = [plain.contiguous()] if plain.layout == torch.strided else _parts_of_sparse(plain)
        content = [part.view(torch.uint8 if part.dim() else part.dtype).numpy().tobytes() for part in parts]
        return (*about, hashlib.sha256(b"".join(content)).hexdigest())
    except (RuntimeError, TypeError, NotImplementedError, AssertionError):  # a dtype without bytes
        return (*about, _Itself(value))


def _parts_of_sparse(value: Tensor) -> list[Tensor]:
    whole = value.coalesce() if value.layout == torch.sparse_coo else value.to_sparse_coo().coalesce()
    return [whole.indices().contiguous(), whole.values().contiguous()]
