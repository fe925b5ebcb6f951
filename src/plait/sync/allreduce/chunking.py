"""Pieces: how a buffer is cut for its journey, and which route each piece takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.splits import split

# Long enough that a piece costs more than its notification.
MOST_BYTES = 1 << 20
# Between hosts, links stand idle while the first piece comes and the last one goes: shorter ones.
MOST_REMOTE_BYTES = 256 << 10
# A piece this small costs no more than half of one.
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
    """`count` elements in pieces of nearly equal size, spread over the routes by size.

    `loads` holds the bytes that each route has been given before; the next piece always takes the one that
    has had least, so small buffers even out what large ones left.
    """
    if count == 0:
        return []
    size = count * item_bytes
    pieces = -(-size // most)
    pieces = -(-pieces // len(loads)) * len(loads)
    pieces = max(1, min(pieces, size // least, count))
    given = list(loads)
    cuts = []
    for own in split(count, pieces):
        route = given.index(min(given))
        given[route] += len(own) * item_bytes
        cuts.append(Chunk(own.start, own.stop, route))
    return cuts
