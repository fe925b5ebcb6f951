"""Topologies: the graphs that an all-reduce travels, as pure values made from the list of hosts.

A topology has one or more routes. A route is a pair of trees with the same root: sums are reduced to the root
along the first, and the result is broadcast along the second. Several routes each carry a part of the data.
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
    """A reduce tree and a broadcast tree, each as the parent of every rank; the root is its own parent."""

    reduce: tuple[int, ...]
    broadcast: tuple[int, ...]

    @property
    def root(self) -> int:
        return next(rank for rank, parent in enumerate(self.reduce) if rank == parent)

    def reduce_parent(self, rank: int) -> int | None:
        """The rank that receives the sum of `rank`; None at the root."""
        return self.reduce[rank] if self.reduce[rank] != rank else None

    def reduce_children(self, rank: int) -> tuple[int, ...]:
        """The ranks whose sums `rank` adds to its own, in this order."""
        return _children(self.reduce, rank)

    def broadcast_parent(self, rank: int) -> int | None:
        """The rank that sends the result to `rank`; None at the root."""
        return self.broadcast[rank] if self.broadcast[rank] != rank else None

    def broadcast_children(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` sends the result to."""
        return _children(self.broadcast, rank)


def _children(parents: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(r for r, parent in enumerate(parents) if parent == rank and r != rank)


@dataclass(frozen=True)
class Topology:
    """Routes over ranks 0 to `size` - 1, and the name of the topology in the job."""

    name: str
    routes: tuple[Route, ...]

    @property
    def size(self) -> int:
        return len(self.routes[0].reduce)


def star(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """Every rank is a child of the root."""
    return (_symmetric_route((root,) * len(hosts)),)


def clique(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """A star at every rank."""
    return tuple(route for rank in range(len(hosts)) for route in star(hosts, rank))


def ring(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """Sums go once round the ring, then the result does; every rank is the root of one route."""
    size = len(hosts)
    return tuple(
        Route(
            tuple(r if r == end else (r + 1) % size for r in range(size)),
            tuple(r if r == end else (r - 1) % size for r in range(size)),
        )
        for end in range(size)
    )


def tree(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """A star on every host, and a star of the hosts' leaders around the root."""
    leaders = _leaders(hosts, root)
    return (_symmetric_route(_below_leaders(hosts, leaders, dict.fromkeys(leaders.values(), root))),)


def binary_tree(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """All ranks in one binary tree, regardless of their hosts."""
    parents = _binary([(root + i) % len(hosts) for i in range(len(hosts))])
    return (_symmetric_route(tuple(parents[rank] for rank in range(len(hosts)))),)


def binary_tree_star(hosts: Hosts, root: int) -> tuple[Route, ...]:
    """A star on every host, and a binary tree of the hosts' leaders."""
    leaders = _leaders(hosts, root)
    return (_symmetric_route(_below_leaders(hosts, leaders, _binary(list(leaders.values())))),)


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
# Topologies with one root, which the user may choose: star:2.
ROOTED = ("star", "tree", "binary-tree", "binary-tree-star")


def make_topology(name: str, hosts: Hosts) -> Topology:
    """The topology `name` over ranks on `hosts`, one host per rank; `star:2` has its root at rank 2."""
    kind, root = check_name(name, len(hosts))
    return Topology(name, TOPOLOGIES[kind](hosts, root))


def check_name(name: str, size: int) -> tuple[str, int]:
    """The kind and the root of the topology `name` over `size` ranks; TopologyError if it is invalid."""
    kind, colon, root = name.partition(":")
    if kind not in TOPOLOGIES:
        hint = did_you_mean(kind, TOPOLOGIES)
        raise TopologyError(f"parallel.topology: found {shown(name)}, expected a topology{hint}")
    if not colon:
        return kind, 0
    if kind not in ROOTED or not re.fullmatch("[0-9]{1,9}", root) or int(root) >= size:
        raise TopologyError(
            f"parallel.topology: found {shown(name)}, expected a root from 0 to {size - 1} after one of "
            f"{', '.join(ROOTED)}"
        )
    return kind, int(root)


def from_graphs(graphs: Any, size: int, where: str) -> Topology:
    """Build and check the topology of a user's graphs over `size` ranks; errors name their source, `where`.

    `graphs` is a list of routes, `{"reduce": [[1, 0], [2, 0]], "broadcast": [[0, 1], [0, 2]]}`: edges from
    rank to rank. Without `broadcast`, the result travels along the edges of `reduce`, reversed.
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
    reduce_edges = _edges(graph["reduce"], f"{where}.reduce")
    broadcast_edges = [(b, a) for a, b in reduce_edges]
    if "broadcast" in graph:
        broadcast_edges = _edges(graph["broadcast"], f"{where}.broadcast")
    reduce = _parents(reduce_edges, size, f"{where}.reduce", "sends its sum to")
    upward = [(b, a) for a, b in broadcast_edges]
    broadcast = _parents(upward, size, f"{where}.broadcast", "gets the result from")
    route = Route(reduce, broadcast)
    if broadcast[route.root] != route.root:
        first = next(rank for rank, parent in enumerate(broadcast) if rank == parent)
        raise TopologyError(
            f"{where}: two roots: sums end at rank {route.root}, but the broadcast begins at rank {first}"
        )
    return route


def _edges(given: Any, where: str) -> list[tuple[int, int]]:
    pairs = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for pair in pairs:
        fine = isinstance(pair, Sequence) and len(pair) == 2 and all(type(rank) is int for rank in pair)
        if not fine:
            raise TopologyError(f"{where}: found {shown(pair)}, expected edges [from, to] between ranks")
    return [(pair[0], pair[1]) for pair in pairs]


def _parents(edges: Edges, size: int, where: str, verb: str) -> tuple[int, ...]:
    """The parent of each rank, from edges that point towards the root; TopologyError for the first fault."""
    unknown = sorted({rank for edge in edges for rank in edge if not 0 <= rank < size})
    if unknown:
        raise TopologyError(f"{where}: unknown {_ranks(unknown)}; the job has ranks 0 to {size - 1}")
    parents: dict[int, int] = {}
    for child, parent in edges:
        if parents.setdefault(child, parent) != parent:
            raise TopologyError(
                f"{where}: rank {child} {verb} ranks {parents[child]} and {parent}, expected one of them"
            )
    if cycle := _cycle(parents):
        raise TopologyError(f"{where}: a cycle, {shortened(' - '.join(map(str, cycle)))}, expected a tree")
    missing = sorted(set(range(size)) - {rank for edge in edges for rank in edge})
    if missing and size > 1:
        raise TopologyError(f"{where}: missing {_ranks(missing)}; expected every rank from 0 to {size - 1}")
    roots = sorted(set(range(size)) - set(parents))
    if len(roots) > 1:
        raise TopologyError(f"{where}: two roots or more, {_ranks(roots)}; join them to one tree")
    return tuple(parents.get(rank, rank) for rank in range(size))


def _cycle(parents: Mapping[int, int]) -> list[int] | None:
    """A cycle in the parents, its first rank repeated at the end, or None."""
    visited: set[int] = set()
    for rank in sorted(parents):
        path: dict[int, None] = {}
        while rank in parents and rank not in visited:
            if rank in path:
                ranks = list(path)
                return [*ranks[ranks.index(rank) :], rank]
            path[rank] = None
            rank = parents[rank]
        visited.update(path)
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, 100)}"


def _symmetric_route(parents: tuple[int, ...]) -> Route:
    return Route(parents, parents)


def _leaders(hosts: Hosts, root: int) -> dict[str, int]:
    """The leader of every host: its first rank, but the root on the root's host, which comes first."""
    leaders = {hosts[root]: root}
    for i in range(len(hosts)):
        rank = (root + i) % len(hosts)
        leaders.setdefault(hosts[rank], hosts.index(hosts[rank]))
    return leaders


def _below_leaders(
    hosts: Hosts, leaders: Mapping[str, int], leader_parents: Mapping[int, int]
) -> tuple[int, ...]:
    """The parent of each rank: its host's leader, and that of a leader as in `leader_parents`."""
    return tuple(leader_parents.get(rank, leaders[host]) for rank, host in enumerate(hosts))


def _binary(ranks: Sequence[int]) -> dict[int, int]:
    """The parent of each rank in a binary tree filled in the order of `ranks`; the first rank is the root."""
    return {rank: ranks[(i - 1) // 2] if i else rank for i, rank in enumerate(ranks)}
