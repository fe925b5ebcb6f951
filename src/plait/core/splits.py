"""Things in a row, split into consecutive parts whose sizes differ by one at most."""

from __future__ import annotations


def part(count: int, index: int, parts: int) -> range:
    """Which of `count` things are in part `index` of `parts`."""
    return range(count * index // parts, count * (index + 1) // parts)


def split(count: int, parts: int) -> list[range]:
    """All parts, in order; with more parts than things some are empty."""
    return [part(count, index, parts) for index in range(parts)]
