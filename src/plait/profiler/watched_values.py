"""Watched values: numbers and text that behave as usual, and report when code uses their value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

# Methods that Python calls on every object.
_UNREPORTED = frozenset(
    (
        *("__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__doc__"),
        *("__dir__", "__init_subclass__", "__subclasshook__", "__sizeof__", "__getnewargs__", "__getstate__"),
        *("__reduce__", "__reduce_ex__", "maketrans", "fromhex", "from_bytes", "from_number"),
    )
)
COUNTING = ("__add__", "__radd__", "__sub__")


def can_watch(value: Any) -> bool:
    """Whether values of this type can be watched."""
    return type(value) in (int, float, str)


def watch(value: Any, on_use: Callable[[], None], counts: Collection[str] = ()) -> Any:
    """`value`, which calls `on_use` when code uses it: compares, computes, formats, looks up by it.

    The methods named by `counts` are not reported; their results are watched too. C code that reads the value
    directly, such as `range`, is not noticed.
    """
    kind: Any = type(value)
    watched = _watched_class(kind, frozenset(counts))(value)
    watched.on_use = on_use
    return watched


def is_watched(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and hasattr(value, "on_use")


def plain(value: Any) -> Any:
    """The value itself, not watched."""
    if not is_watched(value):
        return value
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    return int.__pos__(value) if isinstance(value, int) else float.__pos__(value)


@functools.cache
def _watched_class(kind: type, counts: frozenset[str]) -> type:
    methods: dict[str, Any] = {}
    for name in dir(kind):
        if name in _UNREPORTED or not callable(getattr(kind, name)):
            continue
        methods[name] = _counting(kind, name) if name in counts else _reporting(kind, name)
    return type(f"Watched{kind.__name__.title()}", (kind,), methods)


def _reporting(kind: type, name: str) -> Any:
    method = getattr(kind, name)

    def reported(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if result is not NotImplemented:  # otherwise Python asks the other operand, such as a tensor
            self.on_use()
        return result

    return reported


def _counting(kind: type, name: str) -> Any:
    method = getattr(kind, name)

    def counted(self: Any, other: Any) -> Any:
        result = method(self, other)
        if type(other) not in (int, float) or type(result) not in (int, float):
            self.on_use()
            return result
        return watch(result, self.on_use, COUNTING)

    return counted
