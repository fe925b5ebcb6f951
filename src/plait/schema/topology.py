"""Topologies: the graphs that an all-reduce travels, as pure values made from the list of hosts.

A topology has one or more routes. A route is a pair of trees with one root: along the first, sums travel
from every rank to the root; along the second, the result travels back. Several routes share the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.core.shown import listed, shortened, shown

NATIVE = "native"

Hosts = Sequence[str]
Edges = Sequence[tuple[int, int]]


class TopologyError(InputError):
    """A topology is unknown, or its graphs do not span the workers."""


@dataclass(frozen=True)
class Route:
    """A pair of trees, each as the parent of every rank; the root is its own."""

    reduce: tuple[int, ...]
    broadcast: tuple[int, ...]

    @property
    def root(self) -> int:
        return next(rank for rank, parent in enumerate(self.reduce) if rank == parent)

    def gives_to(self, rank: int) -> int | None:
        """Whom `rank` hands its sum; None at the root."""
        return self.reduce[rank] if self.reduce[rank] != rank else None

    def adds(self, rank: int) -> tuple[int, ...]:
        """Whose sums `rank` adds to its own, in this order."""
        return _children(self.reduce, rank)

    def gets_from(self, rank: int) -> int | None:
        """Who hands `rank` the result; None at the root."""
        return self.broadcast[rank] if self.broadcast[rank] != rank else None

    def passes_to(self, rank: int) -> tuple[int, ...]:
        """Whom `rank` hands the result."""
        return _children(self.broadcast, rank)


def _children(parents: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(r for r, parent in enumerate(parents) if parent == rank and r != rank)


@dataclass(frozen=True)
class Topology:
    """Routes over ranks 0 to `size` - 1; `name` is what the user calls it."""

    name: str
    routes: tuple[Route, ...]

    @property
    def size(self) -> int:
        return len(self.routes[0].reduce)


def star(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """Everyone straight to the root and back."""
    return (_there_and_back((root,) * len(hosts)),)


def clique(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """A star at every rank."""
    return tuple(route for rank in range(len(hosts)) for route in star(hosts, rank))


def ring(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """Once round the ring to sum, once more to tell; every rank is the root of one route."""
    size = len(hosts)
    return tuple(
        Route(
            tuple(r if r == end else (r + 1) % size for r in range(size)),
            tuple(r if r == end else (r - 1) % size for r in range(size)),
        )
        for end in range(size)
    )


def tree(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """A star on every host, and a star of the hosts' leaders at the root."""
    leaders = _leaders(hosts, root)
    return (_there_and_back(_below_leaders(hosts, leaders, dict.fromkeys(leaders.values(), root))),)


def binary_tree(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """Ranks in a binary tree, wherever they are."""
    above = _binary([(root + i) % len(hosts) for i in range(len(hosts))])
    return (_there_and_back(tuple(above[rank] for rank in range(len(hosts)))),)


def binary_tree_star(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """A star on every host, and a binary tree of the hosts' leaders."""
    leaders = _leaders(hosts, root)
    return (_there_and_back(_below_leaders(hosts, leaders, _binary(list(leaders.values())))),)


def multi_star(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """A tree rooted at every host's leader."""
    return tuple(route for leader in _leaders(hosts, 0).values() for route in tree(hosts, leader))


def multi_binary_tree_star(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """A binary tree of leaders rooted at every host's leader, with a star on every host."""
    return tuple(route for leader in _leaders(hosts, 0).values() for route in binary_tree_star(hosts, leader))


TOPOLOGIES: Mapping[str, Callable[[Hosts, int], tuple[Route, ...]]] = {
    "star": star,
    "ring": ring,
    "clique": clique,
    "tree": tree,
    "binary-tree": binary_tree,
    "binary-tree-star": binary_tree_star,
    "multi-binary-tree-star": multi_binary_tree_star,
    "multi-star": multi_star,
}
# Those that have one root, which the user may choose: star:2.
ROOTED = ("star", "tree", "binary-tree", "binary-tree-star")


def make_topology(name: str, hosts: Hosts) -> Topology:
    """The topology of that name over the ranks whose hosts are given; `star:2` has its root at rank 2."""
    kind, root = check_name(name, len(hosts))
    return Topology(name, TOPOLOGIES[kind](hosts, root))


def check_name(name: str, size: int) -> tuple[str, int]:
    """The kind and the root of the topology of that name over `size` ranks; refuses what is none."""
    kind, colon, place = name.partition(":")
    if kind not in TOPOLOGIES:
        hint = did_you_mean(kind, TOPOLOGIES)
        raise TopologyError(f"parallel.topology: found {shown(name)}, expected a topology{hint}")
    if not colon:
        return kind, 0
    if kind not in ROOTED or not re.fullmatch("[0-9]{1,9}", place) or int(place) >= size:
        raise TopologyError(
            f"parallel.topology: found {shown(name)}, expected a root from 0 to {size - 1} after one of "
            f"{', '.join(ROOTED)}"
        )
    return kind, int(place)


def from_graphs(graphs: Any, size: int, where: str) -> Topology:
    """The topology that a user's graphs make over `size` ranks, checked; `where` they were found.

    `graphs` is a list of routes, `{"reduce": [[1, 0], [2, 0]], "broadcast": [[0, 1], [0, 2]]}`: edges from
    rank to rank. Without `broadcast`, the result goes back the way the sums came.
    """
    if not isinstance(graphs, Sequence) or isinstance(graphs, str) or not graphs:
        raise TopologyError(f"{where}: found {shown(graphs)}, expected a list of graphs, each with reduce")
    return Topology(where, tuple(_route(graph, size, f"{where}[{i}]") for i, graph in enumerate(graphs)))


def _route(graph: Any, size: int, where: str) -> Route:
    if not isinstance(graph, Mapping) or "reduce" not in graph:
        raise TopologyError(f"{where}: found {shown(graph)}, expected reduce and broadcast, lists of edges")
    for key in graph:
        if key not in ("reduce", "broadcast"):
            raise TopologyError(
                f"{where}: unknown key {shown(key)}{did_you_mean(key, ('reduce', 'broadcast'))}"
            )
    there = _edges(graph["reduce"], f"{where}.reduce")
    back = [(b, a) for a, b in there]
    if "broadcast" in graph:
        back = _edges(graph["broadcast"], f"{where}.broadcast")
    reduce = _parents(there, size, f"{where}.reduce", "sends its sum to")
    broadcast = _parents([(b, a) for a, b in back], size, f"{where}.broadcast", "gets the result from")
    route = Route(reduce, broadcast)
    if broadcast[route.root] != route.root:
        first = next(rank for rank, parent in enumerate(broadcast) if rank == parent)
        raise TopologyError(
            f"{where}: two roots: sums end at rank {route.root}, but the broadcast begins at rank {first}"
        )
    return route


def _edges(found: Any, where: str) -> list[tuple[int, int]]:
    pairs = found if isinstance(found, Sequence) and not isinstance(found, str) else [found]
    for pair in pairs:
        fine = isinstance(pair, Sequence) and len(pair) == 2 and all(type(rank) is int for rank in pair)
        if not fine:
            raise TopologyError(f"{where}: found {shown(pair)}, expected edges [from, to] between ranks")
    return [(pair[0], pair[1]) for pair in pairs]


def _parents(edges: Edges, size: int, where: str, verb: str) -> tuple[int, ...]:
    """The parent of each rank, from edges that lead towards the root; the first fault found is named."""
    unknown = sorted({rank for edge in edges for rank in edge if not 0 <= rank < size})
    if unknown:
        raise TopologyError(f"{where}: unknown {_ranks(unknown)}; the job has ranks 0 to {size - 1}")
    above: dict[int, int] = {}
    for child, parent in edges:
        if above.setdefault(child, parent) != parent:
            raise TopologyError(
                f"{where}: rank {child} {verb} ranks {above[child]} and {parent}, expected one of them"
            )
    if cycle := _cycle(above):
        raise TopologyError(f"{where}: a cycle, {shortened(' - '.join(map(str, cycle)))}, expected a tree")
    missing = sorted(set(range(size)) - {rank for edge in edges for rank in edge})
    if missing and size > 1:
        raise TopologyError(f"{where}: missing {_ranks(missing)}; every rank from 0 to {size - 1} takes part")
    roots = sorted(set(range(size)) - set(above))
    if len(roots) > 1:
        raise TopologyError(f"{where}: two roots or more, {_ranks(roots)}; join them to one tree")
    return tuple(above.get(rank, rank) for rank in range(size))


def _cycle(above: Mapping[int, int]) -> list[int] | None:
    """A cycle on the way up from some rank, its first rank repeated at the end; None where there is none."""
    ends: set[int] = set()
    for rank in sorted(above):
        path: dict[int, None] = {}
        while rank in above and rank not in ends:
            if rank in path:
                ranks = list(path)
                return [*ranks[ranks.index(rank) :], rank]
            path[rank] = None
            rank = above[rank]
        ends.update(path)
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, 100)}"


def _there_and_back(parents: tuple[int, ...]) -> Route:
    return Route(parents, parents)


def _leaders(hosts: Hosts, root: int) -> dict[str, int]:
    """The first rank of every host, beginning with the root, which leads its own."""
    leaders = {hosts[root]: root}
    for i in range(len(hosts)):
        rank = (root + i) % len(hosts)
        leaders.setdefault(hosts[rank], hosts.index(hosts[rank]))
    return leaders


def _below_leaders(hosts: Hosts, leaders: Mapping[str, int], above: Mapping[int, int]) -> tuple[int, ...]:
    """Every rank below its host's leader, and leaders as `above` says."""
    return tuple(above.get(rank, leaders[host]) for rank, host in enumerate(hosts))


def _binary(order: Sequence[int]) -> dict[int, int]:
    """The parent of each in a binary tree filled in that order; the first is its own."""
    return {rank: order[(i - 1) // 2] if i else rank for i, rank in enumerate(order)}
