"""Sweeps as text: `optimizer.lr=log:1e-4:1e-1:16` or `a.b=1,2,3` into the settings of trials."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.core.shown import shortened, shown

# Values of one key, and trials of a grid, at most.
MOST_VALUES = 10_000
# Values of one key that are checked: of those that are not numbers, and of numbers.
MOST_OTHERS = 2000
FEW_VALUES = 100
_FORM = "key=v1,v2,... or key=log:low:high[:count], also with linear, int or logint in place of log"
_KINDS = ("log", "linear", "int", "logint")
# What looks like a range, whatever it begins with.
_LIKE_A_RANGE = re.compile(r"([A-Za-z_]\w*)((?::[-+]?[0-9][-+.0-9eE]*){2,3})")


@dataclass(frozen=True)
class Dimension:
    """One key of a job and what it may be: listed `values`, or any number from `low` to `high`."""

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def is_range(self) -> bool:
        return not self.values

    def at(self, share: float) -> Any:
        """The value at `share`, from 0 to 1, of the range or of the listed values."""
        if not self.is_range:
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        if self.whole and self.log:
            # Half a step beyond both ends, so that these are as likely as their neighbours.
            low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
            return min(max(round(math.exp(low + share * (high - low))), int(self.low)), int(self.high))
        if self.whole:
            return min(int(self.low + share * (self.high - self.low + 1)), int(self.high))
        if self.log:
            return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return self.low + share * (self.high - self.low)

    def scaled(self, value: Any, factor: float) -> Any:
        """`value` times `factor`: not beyond the ends of what is tried, and whole where all of that is."""
        low, high = min(self.ends()), max(self.ends())
        changed = value * factor
        if all(isinstance(end, int) for end in self.ends()):
            # By one at least, so that small numbers change too.
            changed = math.ceil(changed) if factor > 1 else math.floor(changed)
        return min(max(changed, low), high)

    def ends(self) -> tuple[Any, ...]:
        """Values that stand for all: those listed, or both ends of the range."""
        if not self.is_range:
            return self.values
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def samples(self) -> tuple[Any, ...]:
        """Values that are checked for all: of many numbers the smallest and the largest."""
        values = self.ends()
        if len(values) <= FEW_VALUES:
            return values
        numbers: dict[type, list[Any]] = {int: [], float: []}
        others: list[Any] = []
        for value in values:
            is_number = type(value) is int or (type(value) is float and math.isfinite(value))
            (numbers[type(value)] if is_number else others).append(value)
        if len(others) > MOST_OTHERS:
            raise InputError(
                f"--over {shortened(self.key)}: found {len(others):,} values that are no numbers, such as "
                f"{shown(others[0])}, expected {MOST_OTHERS:,} at most"
            )
        return (*others, *(end(kind) for kind in numbers.values() if kind for end in (min, max)))


def parse_dimension(text: str) -> Dimension:
    """The key of a hyperparameter, as in a job file, and what to try."""
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise InputError(f"--over: found {shown(text)}, expected {_FORM}")
    kind, colon, rest = values.partition(":")
    if colon and kind in _KINDS:
        return _range(key, kind, rest, text)
    if (like := _LIKE_A_RANGE.fullmatch(values)) is not None:
        hint = did_you_mean(like[1], _KINDS)
        raise InputError(f"--over: found {shown(text)}, expected {_FORM}; there is no {like[1]!r}{hint}")
    parts = _parts(values)
    if len(parts) > MOST_VALUES:
        raise InputError(
            f"--over {shortened(key)}: found {len(parts):,} values, expected {MOST_VALUES:,} at most"
        )
    return Dimension(key, tuple(_value(part, key) for part in parts))


def _range(key: str, kind: str, rest: str, text: str) -> Dimension:
    prefix = f"--over: found {shown(text)}, expected"
    try:
        low, high, *more = (float(part) for part in rest.split(":"))
        (count,) = more or (None,)
    except ValueError:
        raise InputError(f"{prefix} {_FORM}") from None
    if not low < high or not math.isfinite(high - low) or (kind.startswith("log") and low <= 0):
        limit = "0 < low < high" if kind.startswith("log") else "low < high"
        raise InputError(f"{prefix} {limit}, and finite numbers")
    whole = kind in ("int", "logint")
    if whole and not (low.is_integer() and high.is_integer() and max(-low, high) <= 2**53):
        raise InputError(f"{prefix} whole numbers after {kind}:, 2**53 at most")
    dimension = Dimension(key, low=low, high=high, log=kind.startswith("log"), whole=whole)
    if count is None:
        return dimension
    if not (count.is_integer() and 2 <= count <= MOST_VALUES):
        raise InputError(f"{prefix} a count of 2 to {MOST_VALUES:,}")
    spaced_evenly = replace(dimension, whole=False) if kind == "logint" else dimension
    inner = [spaced_evenly.at(i / (count - 1)) for i in range(1, int(count) - 1)]
    inner = [round(value) for value in inner] if whole else inner
    spaced = (int(low), *inner, int(high)) if whole else (low, *inner, high)
    return Dimension(key, tuple(dict.fromkeys(spaced)))


def _parts(text: str) -> list[str]:
    """`text` cut at commas outside of brackets, and of quotes that begin within these or after a cut."""
    parts, start, depth, is_quoted = [], 0, 0, False
    for index, letter in enumerate(text):
        if letter == '"' and (is_quoted or depth or index == start):
            is_quoted = not is_quoted
        if is_quoted:
            continue
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _value(text: str, key: str) -> Any:
    """A number, true, false, null or a list where it reads as one, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        unreadable = text.lstrip()[:1] in ("[", "{")
    except (ValueError, RecursionError):  # a number of too many digits, or too many brackets
        unreadable = True
    if unreadable:
        raise InputError(
            f"--over {shortened(key)}: found {shown(text)}, expected a value to try, lists and maps as JSON"
        )
    try:
        return float(text)
    except ValueError:
        return text


def check_keys(dimensions: Sequence[Dimension]) -> None:
    """Refuse a key that comes twice."""
    keys = [dimension.key for dimension in dimensions]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise InputError(f"--over: {shortened(twice)} is given twice; give all its values at once")


def count_combinations(dimensions: Sequence[Dimension]) -> int:
    """How many combinations of listed values there are."""
    return math.prod(len(dimension.values) for dimension in dimensions)


def combinations(dimensions: Sequence[Dimension]) -> list[Mapping[str, Any]]:
    """Every combination of listed values, the last dimension changing fastest."""
    check_keys(dimensions)
    if (count := count_combinations(dimensions)) > MOST_VALUES:
        raise InputError(
            f"--over: found {count:,} combinations, expected {MOST_VALUES:,} at most; "
            f"list fewer values, or draw some of them with --search random and --trials N"
        )
    keys = [dimension.key for dimension in dimensions]
    return [dict(zip(keys, values)) for values in itertools.product(*(d.values for d in dimensions))]


def draw(dimensions: Sequence[Dimension], seed: int, number: int) -> Mapping[str, Any]:
    """Values of trial `number` at random; the same seed and number give the same."""
    source = random.Random(f"{seed}/{number}")
    return {dimension.key: dimension.at(source.random()) for dimension in dimensions}
