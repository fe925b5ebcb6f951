"""Splits a sequence into consecutive parts whose sizes differ by one at most."""

from __future__ import annotations


def part(count: int, index: int, parts: int) -> range:
    """The indices, of `count` items, in part `index` of `parts`."""
    return range(count * index // parts, count * (index + 1) // parts)


def split(count: int, parts: int) -> list[range]:
    """The indices of each part, in order; with more parts than items some are empty."""
    return [part(count, index, parts) for index in range(parts)]
