"""Values that Python code keeps: what they refer to, whether they have changed, and how to restore them."""

from __future__ import annotations

import collections
import contextvars
import functools
import hashlib
import itertools
import math
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

# Packages whose objects have no state of a model, and would take too long to follow.
FOREIGN = frozenset([*sys.stdlib_module_names, "torch", "numpy", "plait", "sympy", "safetensors"])
PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)
# For larger containers, such as a vocabulary, only the length is compared.
_MOST_ITEMS = 10_000
_MOST_ELEMENTS = 1 << 18
_MOST_OBJECTS = 100_000
_MOST_DEPTH = 30
MISSING = object()


def reached(values: Iterable[Any]) -> Iterator[Any]:
    """All objects that values refer to, except plain ones, each once."""
    waiting, seen = list(values), set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, PLAIN) or id(value) in seen or len(seen) > _MOST_OBJECTS:
            continue
        seen.add(id(value))
        yield value
        waiting += _parts(value)


def keyed(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items or attributes of `value`, by key."""
    if isinstance(value, Mapping):
        yield from list(value.items()) if len(value) <= _MOST_ITEMS else ()
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from enumerate(list(value) if len(value) <= _MOST_ITEMS else ())
    elif not isinstance(value, (Tensor, numpy.ndarray)) and is_followed(value):
        yield from list(_slots(value))


def _parts(value: Any) -> Iterator[Any]:
    """The objects that `value` refers to."""
    if isinstance(value, types.MethodType):
        yield value.__self__
    else:
        yield from (part for _, part in keyed(value))


def is_followed(value: Any) -> bool:
    """Whether `value` is an object of a user's class, whose attributes may be state."""
    if isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        return False
    if isinstance(value, (types.SimpleNamespace, threading.local)):
        return True
    return not is_foreign(type(value)) and bool(hasattr(value, "__dict__") or hasattr(value, "__slots__"))


def is_foreign(item: Any, packages: Collection[str] = FOREIGN) -> bool:
    return str(getattr(item, "__module__", "builtins")).partition(".")[0] in packages


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, including `__slots__`."""
    yield from getattr(value, "__dict__", {}).items()
    yield from ((name, getattr(value, name)) for name in slots_of_class(type(value)) if hasattr(value, name))


def slots_of_class(kind: type) -> list[str]:
    """The names in `__slots__` of a class and its bases."""
    slots = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            slots.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return [name for name in slots if name not in ("__dict__", "__weakref__")]


class Tokens:
    """Deep descriptions of values; see `PythonState.tokens`."""

    def __init__(self, same_tensors: bool) -> None:
        self._same_tensors = same_tensors
        self._known: dict[int, Any] = {}
        self._kept: list[Any] = []  # kept alive so that ids are not reused

    def of(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, float) and math.isnan(value):
            return "nan"
        if isinstance(value, PLAIN):
            return type(value).__name__, value
        if isinstance(value, Tensor):
            return "tensor", id(value) if self._same_tensors else (str(tuple(value.shape)), str(value.dtype))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, numpy.generic, itertools.count)):
            return type(value).__name__, str(value)
        if id(value) in self._known:
            return self._known[id(value)]
        if depth > _MOST_DEPTH or len(self._kept) > _MOST_OBJECTS:
            return type(value).__name__
        self._kept.append(value)
        self._known[id(value)] = "around"
        # A digest, as a value may be reached in many ways and is compared each time.
        token = self._known[id(value)] = _digest(self._describe(value, depth + 1))
        return token

    def _describe(self, value: Any, depth: int) -> Any:
        kind = type(value).__qualname__
        if isinstance(value, numpy.ndarray):
            return kind, value.shape, hash(value.tobytes()) if value.size <= _MOST_ELEMENTS else 0
        if (generator := generator_of(value)) is not None:
            state = generator[0]
            return kind, hash(str(state.tolist() if isinstance(state, Tensor) else state))
        if isinstance(value, contextvars.ContextVar):
            return kind, self.of(value.get(None), depth)
        if isinstance(value, Mapping):
            items = value.items() if len(value) <= _MOST_ITEMS else ()
            return kind, len(value), tuple((self.of(k, depth), self.of(v, depth)) for k, v in items)
        if isinstance(value, (set, frozenset)):
            return kind, len(value), hash(frozenset(str(self.of(part, depth)) for part in value))
        if isinstance(value, (list, tuple, collections.deque)):
            parts = value if len(value) <= _MOST_ITEMS else ()
            return kind, len(value), tuple(self.of(part, depth) for part in parts)
        if isinstance(value, types.MethodType):
            return kind, self.of(value.__self__, depth)
        if is_followed(value):
            return kind, tuple((name, self.of(part, depth)) for name, part in _slots(value))
        return kind, id(value)


def _digest(description: Any) -> bytes:
    return hashlib.blake2b(repr(description).encode(), digest_size=16).digest()


def generator_of(value: Any) -> tuple[Any, Callable[[Any], object]] | None:
    """The state of a random generator, and the function that sets it; None if it is no generator."""
    if isinstance(value, random.Random):
        return value.getstate(), value.setstate
    if isinstance(value, (torch.Generator, numpy.random.RandomState)):
        return value.get_state(), value.set_state
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state)
    return None


def restoring_numbers(value: Any) -> Callable[[], object] | None:
    """A function that restores a numpy array or a random generator; None if it is neither."""
    if (generator := generator_of(value)) is not None:
        state, restore = generator
        return functools.partial(restore, state)
    if isinstance(value, numpy.ndarray) and value.flags.writeable:
        return functools.partial(numpy.copyto, value, value.copy())
    return None


def restoring(value: Any) -> Callable[[], object] | None:
    """A function that restores the content of `value`; None if it is immutable."""
    is_large = isinstance(value, numpy.ndarray) and value.size > _MOST_ELEMENTS
    if not is_large and (restore := restoring_numbers(value)) is not None:
        return restore
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        return _refilling(value, dict(value), lambda held: dict.update(value, held))
    if isinstance(value, os._Environ):
        variables = dict(value)
        return lambda: _put_back(value, variables)
    if isinstance(value, contextvars.ContextVar):
        return functools.partial(_set_again, value, value.get(MISSING))
    if isinstance(value, set):
        return _refilling(value, set(value), value.update)
    if isinstance(value, (list, collections.deque)):
        return _refilling(value, list(value), value.extend)
    if not isinstance(value, (Tensor, types.MethodType)) and is_followed(value):
        attributes = dict(_slots(value))
        return lambda: _restore_attributes(value, attributes)
    return None


def _refilling(value: Any, held: Any, fill: Callable[[Any], Any]) -> Callable[[], None] | None:
    if len(held) > _MOST_ITEMS:
        return None

    def refill() -> None:
        value.clear()
        fill(held)

    return refill


def _put_back(environ: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    if dict(environ) != variables:
        environ.clear()
        environ.update(variables)


def _set_again(variable: contextvars.ContextVar[Any], value: Any) -> None:
    # A variable without a value cannot be unset again.
    if value is not MISSING and variable.get(MISSING) is not value:
        variable.set(value)


def _restore_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    for name in [name for name, _ in _slots(value) if name not in attributes]:
        delattr(value, name)
    for name, part in attributes.items():
        if getattr(value, name, MISSING) is not part:
            # Bypass the class, which may forbid it: frozen dataclasses, properties.
            if name in getattr(value, "__dict__", ()):
                value.__dict__[name] = part
            else:
                object.__setattr__(value, name, part)
