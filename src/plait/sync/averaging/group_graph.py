"""Pure functions on groups of workers: whether they stay connected, random pairs, owners of parts."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

Group = tuple[int, ...]


def components(groups: Iterable[Collection[int]], members: Collection[int]) -> list[frozenset[int]]:
    """The connected components of `members`, joined by `groups`, in the order of their lowest ranks."""
    parts = [frozenset([member]) for member in sorted(members)]
    for group in groups:
        touched = [part for part in parts if part & set(group)]
        if len(touched) > 1:
            parts = [part for part in parts if part not in touched]
            parts.append(frozenset().union(*touched))
    return sorted(parts, key=min)


def recent(groups: Sequence[Group], members: int, every: int) -> tuple[Group, ...]:
    """The newest groups of at most `every` rounds, oldest first; at least the last group.

    A round is as many groups as have `members` members in total, so each worker averages once per round on
    average, whatever the size of groups.
    """
    kept: list[Group] = []
    count = 0
    for group in reversed(groups):
        count += len(group)
        if kept and count > every * members:
            break
        kept.append(group)
    return tuple(reversed(kept))


def remembered(groups: Sequence[Group], members: int, every: int) -> tuple[Group, ...]:
    """The newest groups that `disconnected` needs for later decisions."""
    kept: list[Group] = []
    count = 0
    for group in reversed(groups):
        kept.append(group)
        count += len(group)
        if count >= every * members:
            break
    return tuple(reversed(kept))


def disconnected(
    past: Sequence[Group], group: Collection[int], members: Collection[int], every: int
) -> list[frozenset[int]]:
    """The components of `members` of which a member must join `group` so that all stay connected.

    Empty if the groups of the last `every` rounds, including this one, connect all members, and before there
    have been `every` rounds.
    """
    groups = [*past, tuple(group)]
    if sum(map(len, groups)) < every * len(members):
        return []
    parts = components(recent(groups, len(members), every), members)
    return [part for part in parts if not part & set(group)] if len(parts) > 1 else []


def pairs(seed: int, round_: int, members: Collection[int]) -> dict[int, int]:
    """The partner of each member in round `round_`, a random matching; with an odd number one has none."""
    shuffled = sorted(members)
    random.Random(f"{seed}/{round_}").shuffle(shuffled)
    partners: dict[int, int] = {}
    for a, b in zip(shuffled[::2], shuffled[1::2]):
        partners[a], partners[b] = b, a
    return partners


def bipartite_neighbours(rank: int, members: Collection[int], graph: str) -> tuple[int, ...]:
    """The neighbours of `rank` in a bipartite graph of members with even index and members with odd index.

    `graph` is `complete` (all of the other parity) or `ring` (the two adjacent ones). Edges join indices of
    different parity only, so there is no cycle of workers that wait for each other.
    """
    ordered = sorted(members)
    index = ordered.index(rank)
    if graph == "ring":
        sides = {(index - 1) % len(ordered), (index + 1) % len(ordered)}
        return tuple(ordered[p] for p in sorted(sides) if p % 2 != index % 2)
    return tuple(ordered[p] for p in range(len(ordered)) if p % 2 != index % 2)


def asked_by(rank: int, living: Collection[int], graph: str) -> tuple[int, ...]:
    """The live neighbours that `rank` asks; members with an odd index ask none and only answer."""
    is_asker = sorted(living).index(rank) % 2 == 0
    return bipartite_neighbours(rank, living, graph) if is_asker else ()


def owners_for(byte_count: int, members: int, least_bytes: int) -> int:
    """The number of members that share the averaging; each takes at least `least_bytes`."""
    return max(1, min(members, byte_count // max(least_bytes, 1)))


def shards(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """The indices of the tensors of each server: largest first, each to the least loaded server."""
    kept: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        kept[least].append(index)
        loads[least] += sizes[index]
    return [sorted(indices) for indices in kept]
