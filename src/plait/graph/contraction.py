"""Contracts graphs with too many cuts: chains and parallel branches become one node each.

Every cut of the contracted graph is a cut of the original graph, so a plan for it is a plan for the original;
only the best plan may be lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.graph.ideals import Ideals, TooManyIdeals, ideals_of_groups
from plait.schema.plans.graph import Graph

# The largest size of a group, as a fraction of the graph's seconds, increases in these steps.
_STEPS = (1 / 512, 1 / 128, 1 / 32, 1 / 8, 1.0)


def contracted_ideals(graph: Graph, at_most: int) -> Ideals | None:
    """Ideals of the graph with its chains, then its series-parallel parts, contracted as little as necessary.

    None if even the fully contracted graph has more than `at_most`.
    """
    contracted = _ContractedGraph(graph)
    for step in _STEPS:
        for _ in contracted.contract(step * graph.compute_s()):
            try:
                return ideals_of_groups(graph, contracted.groups(), at_most)
            except TooManyIdeals:
                continue
    return None


class _ContractedGraph:
    """A graph whose nodes are sets of nodes."""

    def __init__(self, graph: Graph) -> None:
        self._members = {name: [name] for name in graph.order}
        self._seconds = {name: graph.node_by_id[name].compute_s for name in graph.order}
        self._before = {name: set(graph.predecessors[name]) for name in graph.order}
        self._behind = {name: set(graph.successors[name]) for name in graph.order}

    def groups(self) -> list[list[str]]:
        return list(self._members.values())

    def contract(self, most_s: float) -> Iterator[None]:
        """Merge groups of up to `most_s` seconds; yields after each pass over chains or branches."""
        merged = True
        while merged:
            merged = self._merge_chains(most_s)
            if merged:
                yield
            branches = self._merge_branches(most_s)
            if branches:
                yield
            merged = merged or branches

    def _merge_chains(self, most_s: float) -> bool:
        merged = False
        for name in list(self._members):
            while name in self._members and len(self._behind[name]) == 1:
                (follower,) = self._behind[name]
                if len(self._before[follower]) > 1 or not self._fit(name, follower, most_s):
                    break
                self._merge(name, follower)
                merged = True
        return merged

    def _merge_branches(self, most_s: float) -> bool:
        """Merge groups with the same neighbours."""
        merged = False
        alike: dict[tuple[frozenset[str], frozenset[str]], str] = {}
        for name in list(self._members):
            neighbours = frozenset(self._before[name]), frozenset(self._behind[name])
            first = alike.setdefault(neighbours, name)
            if first != name and self._fit(first, name, most_s):
                self._merge(first, name)
                merged = True
        return merged

    def _fit(self, one: str, other: str, most_s: float) -> bool:
        return self._seconds[one] + self._seconds[other] <= most_s

    def _merge(self, kept: str, gone: str) -> None:
        self._members[kept] += self._members.pop(gone)
        self._seconds[kept] += self._seconds.pop(gone)
        before, behind = self._before.pop(gone), self._behind.pop(gone)
        for name in before:
            self._behind[name].discard(gone)
            if name != kept:
                self._behind[name].add(kept)
        for name in behind:
            self._before[name].discard(gone)
            self._before[name].add(kept)
        self._before[kept] |= before - {kept}
        self._behind[kept] |= behind
        self._behind[kept].discard(kept)
