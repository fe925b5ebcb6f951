"""Splits a buffer into chunks and assigns each to a route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.splits import split

# Large enough that a chunk costs more than its notification.
MOST_BYTES = 1 << 20
# Smaller between hosts, where links are idle during the first and the last chunk.
MOST_REMOTE_BYTES = 256 << 10
# Splitting chunks of this size further saves no time.
LEAST_BYTES = 16 << 10


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `stop` of a buffer, and the route they take."""

    start: int
    stop: int
    route: int


def cut_buffer(
    count: int, item_bytes: int, loads: Sequence[int], most: int = MOST_BYTES, least: int = LEAST_BYTES
) -> list[Chunk]:
    """Split `count` elements into chunks of nearly equal size, balanced over the routes.

    `loads` holds the bytes assigned to each route before; each chunk takes the least loaded route, so small
    buffers balance what large ones left uneven.
    """
    if count == 0:
        return []
    size = count * item_bytes
    chunks = -(-size // most)
    chunks = -(-chunks // len(loads)) * len(loads)
    chunks = max(1, min(chunks, size // least, count))
    total = list(loads)
    result = []
    for part in split(count, chunks):
        route = total.index(min(total))
        total[route] += len(part) * item_bytes
        result.append(Chunk(part.start, part.stop, route))
    return result
