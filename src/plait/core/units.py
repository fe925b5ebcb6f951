"""Parses and formats bytes, seconds and rates."""

from __future__ import annotations

import contextlib
import math
import re

from plait.core.errors import InputError
from plait.core.shown import shown

_SCALE = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str, key: str) -> int:
    """Parse `16GB`, `512MiB` or `1e9` into bytes; error messages name `key`."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    number = math.inf
    if match is not None and (match[2] or not match[3]):
        prefix = match[2].upper()
        with contextlib.suppress(ValueError):  # 1.2.3
            number = float(match[1]) * (_BINARY[prefix] if match[3] else _SCALE[prefix])
    if not math.isfinite(number):
        raise InputError(f"{key}: found {shown(text)}, expected a size such as 16GB, 512MiB or 1e9")
    return int(number)


def show_bytes(count: float) -> str:
    """`1.5 GB`, as PipeDream's and our tables print it (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def show_seconds(seconds: float) -> str:
    """`0 s`, `340 µs`, `12.4 ms`, `3.2 s`, `4 min 05 s` or `2 h 10 min`."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    if seconds < 0:
        return f"-{show_seconds(-seconds)}"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    if minutes < 60 * 10_000:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 3600:.3g} h"


def show_rate(per_s: float) -> str:
    """`5,120` or `0.34`: how often something happens in a second."""
    return f"{per_s:,.0f}" if per_s >= 9.95 or per_s == 0 else f"{per_s:.2g}"


def show_cell(value: object) -> str:
    """A value in a table: `-` for none, four digits of a float."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def count_of(number: int, one: str, many: str | None = None) -> str:
    """`1 worker`, `2 workers`; `many` is the plural if it is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
