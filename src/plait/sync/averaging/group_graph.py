"""Pure decisions about groups of workers: whether they stay connected, who pairs with whom, who owns what."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

Group = tuple[int, ...]


def components(groups: Iterable[Collection[int]], members: Collection[int]) -> list[frozenset[int]]:
    """The parts of `members` between which no group has carried anything, in order of their lowest rank."""
    parts = [frozenset([member]) for member in sorted(members)]
    for group in groups:
        touched = [part for part in parts if part & set(group)]
        if len(touched) > 1:
            parts = [part for part in parts if part not in touched]
            parts.append(frozenset().union(*touched))
    return sorted(parts, key=min)


def recent(groups: Sequence[Group], members: int, every: int) -> tuple[Group, ...]:
    """The newest groups of `every` rounds at most, oldest first; at least the last group.

    A round is as many groups as have one place for each of `members` workers, so it is one group where all
    are in it, and as much averaging for each worker where groups are small.
    """
    kept: list[Group] = []
    places = 0
    for group in reversed(groups):
        places += len(group)
        if kept and places > every * members:
            break
        kept.append(group)
    return tuple(reversed(kept))


def remembered(groups: Sequence[Group], members: int, every: int) -> tuple[Group, ...]:
    """What has to be known of the past for the decisions to come."""
    kept: list[Group] = []
    places = 0
    for group in reversed(groups):
        kept.append(group)
        places += len(group)
        if places >= every * members:
            break
    return tuple(reversed(kept))


def cut_off(
    past: Sequence[Group], group: Collection[int], members: Collection[int], every: int
) -> list[frozenset[int]]:
    """The parts of `members` that have to send someone into `group` so that all stay connected.

    Empty where the groups of the last `every` rounds, this one included, already connect all, and where
    there have been fewer rounds.
    """
    groups = [*past, tuple(group)]
    if sum(map(len, groups)) < every * len(members):
        return []
    parts = components(recent(groups, len(members), every), members)
    return [part for part in parts if not part & set(group)] if len(parts) > 1 else []


def pairs(seed: int, round_: int, members: Collection[int]) -> dict[int, int]:
    """Who averages with whom in round `round_`: a random matching; of an odd number one stays alone."""
    order = sorted(members)
    random.Random(f"{seed}/{round_}").shuffle(order)
    found: dict[int, int] = {}
    for a, b in zip(order[::2], order[1::2]):
        found[a], found[b] = b, a
    return found


def bipartite_neighbours(rank: int, members: Collection[int], graph: str) -> tuple[int, ...]:
    """The neighbours of `rank`: members of even place ask, members of odd place answer.

    `graph` is `complete` (every asker knows every answerer) or `ring` (its two sides). An edge joins unlike
    places only, so nobody waits in a circle.
    """
    order = sorted(members)
    place = order.index(rank)
    if graph == "ring":
        sides = {(place - 1) % len(order), (place + 1) % len(order)}
        return tuple(order[p] for p in sorted(sides) if p % 2 != place % 2)
    return tuple(order[p] for p in range(len(order)) if p % 2 != place % 2)


def asked_by(rank: int, living: Collection[int], graph: str) -> tuple[int, ...]:
    """The living neighbours that `rank` asks: those of a member of even place; others only answer."""
    is_asker = sorted(living).index(rank) % 2 == 0
    return bipartite_neighbours(rank, living, graph) if is_asker else ()


def owners_for(byte_count: int, members: int, least_bytes: int) -> int:
    """How many members share the averaging: each takes `least_bytes` at least, for each costs messages."""
    return max(1, min(members, byte_count // max(least_bytes, 1)))


def shards(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Which tensors each server keeps, by bytes: the largest first, each to the server with the least."""
    kept: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        kept[least].append(index)
        loads[least] += sizes[index]
    return [sorted(own) for own in kept]
