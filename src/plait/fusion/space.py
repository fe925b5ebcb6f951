"""Sweeps as text: `optimizer.lr=log:1e-4:1e-1:16` or `a.b=1,2,3` into the settings of trials."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from plait.fusion.errors import FusionError

_FORM = "key=v1,v2,... or key=log:low:high:count or key=linear:low:high:count"


def parse_over(text: str) -> tuple[str, list[Any]]:
    """The key of a hyperparameter, as in a job file, and the values to try."""
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise FusionError(f"--over: found {text!r}, expected {_FORM}")
    kind, colon, rest = values.partition(":")
    if colon and kind in ("log", "linear"):
        return key, _spaced(kind, rest, text)
    return key, [_value(part) for part in values.split(",")]


def _spaced(kind: str, rest: str, text: str) -> list[float]:
    try:
        low_text, high_text, count_text = rest.split(":")
        low, high, count = float(low_text), float(high_text), int(count_text)
    except ValueError:
        raise FusionError(f"--over: found {text!r}, expected {_FORM}") from None
    if count < 2 or (kind == "log" and min(low, high) <= 0) or not math.isfinite(low + high):
        limit = "positive ends and " if kind == "log" else ""
        raise FusionError(f"--over: found {text!r}, expected {limit}a count of 2 or more")
    if kind == "log":
        inner = [
            math.exp(math.log(low) + (math.log(high) - math.log(low)) * i / (count - 1)) for i in range(count)
        ]
    else:
        inner = [low + (high - low) * i / (count - 1) for i in range(count)]
    return [low, *inner[1:-1], high]


def _value(text: str) -> Any:
    """A number, true, false or null where it reads as one, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def grid(over: Sequence[str]) -> list[Mapping[str, Any]]:
    """Every combination of the given values: one mapping from keys to values for each trial."""
    parsed = [parse_over(text) for text in over]
    keys = [key for key, _ in parsed]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise FusionError(f"--over: {twice} is given twice; give all its values at once")
    return [dict(zip(keys, values)) for values in itertools.product(*(values for _, values in parsed))]
