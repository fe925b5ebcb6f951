"""Watched values: numbers and text that behave as ever, and note when code looks at them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

# What Python does with every object, whatever code does with its value.
_UNNOTED = frozenset(
    (
        *("__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__doc__"),
        *("__dir__", "__init_subclass__", "__subclasshook__", "__sizeof__", "__getnewargs__", "__getstate__"),
        *("__reduce__", "__reduce_ex__", "maketrans", "fromhex", "from_bytes", "from_number"),
    )
)
COUNTING = ("__add__", "__radd__", "__sub__")


def can_watch(value: Any) -> bool:
    """Whether there can be another value of this kind that notes who looks at it."""
    return type(value) in (int, float, str)


def watch(value: Any, note: Callable[[], None], counts: Collection[str] = ()) -> Any:
    """`value`, which calls `note` when code looks at it: compares, computes, formats, looks up by it.

    The methods named by `counts` are no looks; what they return is watched, too. Code in C that takes the
    value as it is, such as `range`, is not noticed.
    """
    kind: Any = type(value)
    found = _watched_class(kind, frozenset(counts))(value)
    found.note = note
    return found


def is_watched(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and hasattr(value, "note")


def plain(value: Any) -> Any:
    """The value itself, of which nobody notes anything."""
    if not is_watched(value):
        return value
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    return int.__pos__(value) if isinstance(value, int) else float.__pos__(value)


@functools.cache
def _watched_class(kind: type, counts: frozenset[str]) -> type:
    methods: dict[str, Any] = {}
    for name in dir(kind):
        if name in _UNNOTED or not callable(getattr(kind, name)):
            continue
        methods[name] = _counting(kind, name) if name in counts else _noting(kind, name)
    return type(f"Watched{kind.__name__.title()}", (kind,), methods)


def _noting(kind: type, name: str) -> Any:
    method = getattr(kind, name)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = method(self, *args, **kwargs)
        if found is not NotImplemented:  # as where the other side is a tensor, which knows what to do
            self.note()
        return found

    return noted


def _counting(kind: type, name: str) -> Any:
    method = getattr(kind, name)

    def counted(self: Any, other: Any) -> Any:
        found = method(self, other)
        if type(other) not in (int, float) or type(found) not in (int, float):
            self.note()
            return found
        return watch(found, self.note, COUNTING)

    return counted
