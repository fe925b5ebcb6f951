"""Frozen dataclasses to plain JSON values and back, checked field by field.

One codec serves artefacts, events and the settings sent to workers, so a value has one spelling everywhere.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from plait.core.errors import ArtefactError
from plait.core.names import did_you_mean
from plait.core.shown import shortened, shown

T = TypeVar("T")
# What is encoded as it is: most of what events hold, so it is asked first.
_PLAIN = frozenset({int, float, str, bool, type(None)})
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", tuple: "a list"}


def encode(value: Any) -> Any:
    """`value` as what `json.dumps` takes: dataclasses become objects, tuples lists, enums their values."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(item) for item in value]
    return value


def finite(number: float) -> float | None:
    """`number`, or None if it is NaN or infinite, which JSON does not have."""
    return number if math.isfinite(number) else None


def finite_numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """`values`, with None in the place of those that are NaN or infinite."""
    return {name: finite(value) for name, value in values.items()}


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """A `cls` from what `encode` returned; error messages name fields below `where`."""
    return cast("T", _decode(cls, data, where or cls.__name__))


def decode_over(value: T, data: Mapping[str, Any], where: str) -> T:
    """A copy of the dataclass `value` with the fields in `data` decoded and replaced."""
    return cast("T", dataclasses.replace(cast("Any", value), **_decode_fields(type(value), data, where)))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), data, where)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        return _expect(data in choices, data, _one_of(choices), where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast("type", kind), data, where)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), data, where)
    if origin is list:
        (item,) = typing.get_args(kind)
        _expect(isinstance(data, list), data, kind, where)
        return [_decode(item, x, f"{where}[{i}]") for i, x in enumerate(data)]
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(data, Mapping), data, kind, where)
        key_kind, item = typing.get_args(kind)
        return {
            _decode_key(key_kind, k, where): _decode(item, x, f"{where}.{shortened(str(k))}")
            for k, x in data.items()
        }
    return _decode_scalar(kind, data, where)


def _decode_key(kind: Any, key: Any, where: str) -> Any:
    """The key of a mapping; JSON has only text keys, so integers are parsed."""
    if kind is not int:
        return key
    try:
        return int(key)
    except (TypeError, ValueError):
        raise ArtefactError(f"{where}: found the key {shown(key)}, expected whole numbers") from None


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        choices = [member.value for member in kind]
        _expect(data in choices, data, _one_of(choices), where)
        return kind(data)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        _expect(abs(data) < 10**300, data, kind, where)
        return float(data)
    if kind is Path:
        _expect(isinstance(data, str), data, kind, where)
        return Path(data)
    expected = type(None) if kind is None else kind
    is_bool_for_int = isinstance(data, bool) and kind is not bool
    return _expect(isinstance(data, expected) and not is_bool_for_int, data, kind, where)


def _decode_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    failures = []
    for kind in kinds:
        try:
            return _decode(kind, data, where)
        except ArtefactError as failure:
            failures.append(failure)
    # The error with the deepest path belongs to the alternative that fits best.
    raise max(failures, key=lambda f: len(str(f).partition(":")[0]))


def _decode_tuple(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    _expect(isinstance(data, (list, tuple)), data, tuple, where)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_decode(kinds[0], x, f"{where}[{i}]") for i, x in enumerate(data))
    _expect(len(data) == len(kinds), data, f"{len(kinds)} values", where)
    return tuple(_decode(k, x, f"{where}[{i}]") for i, (k, x) in enumerate(zip(kinds, data)))


def _decode_dataclass(cls: type, data: Any, where: str) -> Any:
    _expect(isinstance(data, Mapping), data, cls, where)
    given = _decode_fields(cls, data, where)
    for field in dataclasses.fields(cls):
        optional = field.default is not dataclasses.MISSING or not field.init
        if field.name not in data and not optional and field.default_factory is dataclasses.MISSING:
            raise ArtefactError(f"{where}: field {field.name!r} is missing")
    return cls(**given)


def _decode_fields(cls: Any, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    fields = [f.name for f in dataclasses.fields(cls) if f.init]
    hints = _hints(cls)
    for name in data:
        if name not in fields:
            raise ArtefactError(f"{where}: unknown field {shown(name)}{did_you_mean(name, fields)}")
    return {name: _decode(hints[name], data[name], f"{where}.{name}") for name in data}


def _one_of(choices: Sequence[Any]) -> str:
    return "one of " + ", ".join(map(str, choices))


def _expect(holds: bool, data: Any, kind: Any, where: str) -> Any:
    if not holds:
        name = kind if isinstance(kind, str) else _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
        raise ArtefactError(f"{where}: found {shown(data)}, expected {name}")
    return data
