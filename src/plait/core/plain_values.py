"""Values that a job file can hold: text, numbers, true, false, null, and lists and mappings of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from plait.core.errors import JobError
from plait.core.names import not_in_script
from plait.core.shown import shortened, shown
from plait.core.yaml_text import MOST_DIGITS, MOST_LEVELS, MOST_VALUES


def plain_copy(value: Any, path: str = "") -> Any:
    """A copy of `value` as plain values; `path` is its key in the job, for error messages.

    Tuples become lists and paths text. JobError for anything else, for values that contain themselves, and
    for too many values.
    """
    return _copy(value, path, 0, itertools.count(1))


def _copy(value: Any, path: str, level: int, made: Iterator[int]) -> Any:
    """`made` counts the values of the whole copy."""
    where = path or "the job"
    if level > MOST_LEVELS or next(made) > MOST_VALUES:
        raise JobError(
            f"{where}: found too many values; expected {MOST_LEVELS} levels and {MOST_VALUES:,} at most"
        )
    if isinstance(value, Mapping):
        return {
            _key(key, where): _copy(each, f"{path}.{shortened(str(key))}".lstrip("."), level + 1, made)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copy(each, f"{path}[{i}]", level + 1, made) for i, each in enumerate(value)]
    return _scalar(value, where)


def _scalar(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (str, Path)):
        return _text(str(value), where)
    if isinstance(value, int):
        if abs(value) >= 10**MOST_DIGITS:
            raise JobError(f"{where}: found {shown(value)}, expected {MOST_DIGITS} at most")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (type, FunctionType)):
        raise JobError(f"{where}: {_named(value)}")
    raise JobError(
        f"{where}: found {shown(value)}, expected text, a number, true, false, null, or a list or mapping "
        f"of them; code is given by its name, 'package.module:name'"
    )


def _named(code: type | FunctionType) -> str:
    """The message for a class or a function where its name is expected."""
    kind, name = "class" if isinstance(code, type) else "function", code.__qualname__
    prefix = f"found the {kind} {code.__module__}.{shortened(name)}"
    if code.__module__ == "__main__":
        return f"{prefix}; {not_in_script(name)}"
    if "<" in name:
        return f"{prefix}, which no other process can import; put it at the top level of a module"
    return f"{prefix}, expected its name, '{code.__module__}:{shortened(name)}': workers import it by that"


def _key(key: Any, where: str) -> Any:
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if not isinstance(key, str):
        raise JobError(f"{where}: found the key {shown(key)}, expected text")
    return _text(key, where)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise JobError(f"{where}: found {shown(text)}, which is no text in Unicode") from None
    return text
