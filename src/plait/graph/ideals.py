"""The ideals of a graph (where it can be cut), with the costs between any two of them.

An ideal (down-set) is a set of nodes that contains all predecessors of its members: the part before a cut. A
stage is the difference of two nested ideals. Sums over a stage are differences of sums over ideals, so a
planner needs only the arrays in this class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from plait.schema.plans.graph import Edge, Graph, Node

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class TooManyIdeals(Exception):
    """The graph has more ideals than the given limit."""


@dataclass(frozen=True, eq=False)
class Ideals:
    """Ideals of `graph`, smaller ones first, from the empty one to the whole graph.

    `members[i, n]` is whether ideal i contains node n of `graph.order`.
    """

    graph: Graph
    members: Bools

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def compute_s(self) -> Floats:
        """Forward and backward seconds of each ideal."""
        return self.sums([node.compute_s for node in self._nodes])

    @cached_property
    def parameter_bytes(self) -> Floats:
        """Parameter bytes of each ideal."""
        return self.sums([node.parameter_bytes for node in self._nodes])

    @cached_property
    def crossing_bytes(self) -> Floats:
        """Bytes that leave each ideal; a tensor is counted once, however many consumers are outside."""
        return self._crossing(self.graph.edges)

    @cached_property
    def kept_behind_bytes(self) -> Floats:
        """The crossing bytes that a layer outside the ideal counts among its activations."""
        return self._crossing([edge for edge in self.graph.edges if edge.kept])

    def _crossing(self, edges: Iterable[Edge]) -> Floats:
        position = {name: n for n, name in enumerate(self.graph.order)}
        consumers: dict[tuple[str, str], list[int]] = {}
        sizes: dict[tuple[str, str], float] = {}
        for edge in edges:
            consumers.setdefault((edge.source, edge.tensor), []).append(position[edge.target])
            sizes[edge.source, edge.tensor] = edge.bytes
        crossing = np.zeros(len(self))
        for (source, tensor), targets in consumers.items():
            crosses = self.members[:, position[source]] & ~self.members[:, targets].all(axis=1)
            crossing += crosses * sizes[source, tensor]
        return crossing

    @cached_property
    def nested(self) -> Bools:
        """`nested[i, j]`: ideal i is a proper subset of ideal j, so their difference is a stage."""
        packed = np.packbits(self.members, axis=1)
        padded = np.zeros((len(self), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
        padded[:, : packed.shape[1]] = packed
        nested = np.triu(np.ones((len(self), len(self)), dtype=bool), k=1)
        for word in padded.view(np.uint64).T:
            nested &= (word[:, None] & ~word[None, :]) == 0
        return nested

    def sums(self, amounts: Sequence[float]) -> Floats:
        """The sum over the members of each ideal; `amounts` follow `graph.order`."""
        return np.asarray(self.members.astype(np.float64) @ np.asarray(amounts, dtype=np.float64))

    def between(self, i: int, j: int) -> tuple[str, ...]:
        """Ids of the nodes in ideal j but not in ideal i, in the graph's order."""
        inside = self.members[j] & ~self.members[i]
        return tuple(name for name, chosen in zip(self.graph.order, inside) if chosen)

    @cached_property
    def _nodes(self) -> list[Node]:
        return [self.graph.node_by_id[name] for name in self.graph.order]


def trivial_ideals(graph: Graph) -> Ideals:
    """Only the empty ideal and the whole graph, for an uncut graph."""
    nodes = len(graph.order)
    return Ideals(graph, np.array([np.zeros(nodes, dtype=bool), np.ones(nodes, dtype=bool)]))


def all_ideals(graph: Graph, at_most: int) -> Ideals:
    """Every ideal of `graph`, with any number of sources; raises `TooManyIdeals` if there are more."""
    return ideals_of_groups(graph, [[name] for name in graph.order], at_most)


def ideals_of_groups(graph: Graph, groups: Sequence[Iterable[str]], at_most: int) -> Ideals:
    """The ideals of `graph` that contain each group entirely or not at all.

    The groups must cover the graph, and contracting them must not create cycles.
    """
    group_of = {name: g for g, names in enumerate(groups) for name in names}
    needs = [0] * len(groups)
    followers: list[set[int]] = [set() for _ in groups]
    for edge in graph.edges:
        source, target = group_of[edge.source], group_of[edge.target]
        if source != target:
            needs[target] |= 1 << source
            followers[source].add(target)
    masks = _grow(needs, followers, at_most)
    membership = np.zeros((len(masks), len(groups)), dtype=bool)
    for i, mask in enumerate(masks):
        bits = np.frombuffer(mask.to_bytes((len(groups) + 7) // 8, "little"), dtype=np.uint8)
        membership[i] = np.unpackbits(bits, bitorder="little")[: len(groups)]
    columns = [group_of[name] for name in graph.order]
    return Ideals(graph, membership[:, columns])


def _grow(needs: Sequence[int], followers: Sequence[set[int]], at_most: int) -> list[int]:
    """All down-sets as bit masks, by size: each is extended by elements whose predecessors it contains."""
    sources = frozenset(g for g, mask in enumerate(needs) if mask == 0)
    layer: dict[int, frozenset[int]] = {0: sources}
    masks: list[int] = []
    while layer:
        masks += layer
        if len(masks) > at_most:
            raise TooManyIdeals(f"more than {at_most}")
        grown: dict[int, frozenset[int]] = {}
        for mask, ready in layer.items():
            for g in ready:
                bigger = mask | 1 << g
                if bigger not in grown:
                    new = {f for f in followers[g] if needs[f] & ~bigger == 0}
                    grown[bigger] = (ready - {g}) | new
        layer = grown
    return masks
