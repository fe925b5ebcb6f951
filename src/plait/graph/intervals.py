"""Intervals of ideals: a few hundred sets that cover all cuts of a graph, with the cheapest cut of each.

An interval is the set of ideals that contain the nodes `inside` (a down-set) and none of the nodes `outside`
(an up-set). Splitting at a free node v gives the ideals with v (and its ancestors) and those without (nor
its descendants): together the same ideals, none twice. So any number of splits of the interval of all
ideals covers every ideal exactly once, and a bound that holds for each interval holds for the graph.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from plait.graph.ideals import Bools, Floats, Ideals
from plait.schema.plans.graph import Graph


@dataclass(frozen=True, eq=False)
class Interval:
    """The ideals between two bounds; the bounds are masks in the order of `graph.order`."""

    inside: Bools
    outside: Bools

    @property
    def free(self) -> Bools:
        return ~(self.inside | self.outside)


@dataclass(frozen=True, eq=False)
class CutPoint:
    """The minimum of crossing bytes in an interval, and the smallest and largest ideal that attain it."""

    crossing_bytes: float
    smallest: Bools
    largest: Bools


@dataclass(frozen=True, eq=False)
class Cover:
    """Intervals that cover every ideal except the empty and the whole one, with their best cuts."""

    graph: Graph
    intervals: tuple[Interval, ...]
    cuts: tuple[CutPoint, ...]

    def ideals(self, steps: int) -> Ideals:
        """The cheapest ideals of all intervals, and `steps` more along the graph's order.

        Cheap cuts are where the graph is narrow; the others fill the gaps between them, so that stages can be
        balanced where cheap cuts are far apart.
        """
        nodes = len(self.graph.order)
        rows = [cut.smallest for cut in self.cuts] + [cut.largest for cut in self.cuts]
        for step in range(steps + 1):
            rows.append(np.arange(nodes) < round(step * nodes / steps))
        return family(self.graph, np.array(rows))


def family(graph: Graph, members: Bools) -> Ideals:
    """The ideals of the given rows, without duplicates, smaller ones first."""
    rows = np.unique(members, axis=0)
    return Ideals(graph, rows[np.argsort(rows.sum(axis=1), kind="stable")])


def cover_ideals(graph: Graph, count: int) -> Cover:
    """Cover all ideals of `graph` by at most `count` intervals; the widest are split first."""
    ancestors = _ancestors(graph)
    width = _share(graph, "compute_s") + _share(graph, "parameter_bytes")
    nodes = len(graph.order)
    whole = Interval(np.zeros(nodes, dtype=bool), np.zeros(nodes, dtype=bool))
    heap = [(-float(width.sum()), 0, whole)]
    finished: list[Interval] = []
    while heap and len(heap) + len(finished) < count:
        _, number, interval = heapq.heappop(heap)
        if not interval.free.any():
            finished.append(interval)
            continue
        for side, part in enumerate(_split(interval, ancestors, width)):
            heapq.heappush(heap, (-float(width[part.free].sum()), 2 * number + side + 1, part))
    intervals = [*finished, *(interval for _, _, interval in heap)]
    # The empty ideal and the whole graph are not cuts, so they are removed from the intervals.
    kept = [part for interval in intervals for part in _without_ends(interval, graph, ancestors)]
    cuts = _Network(graph)
    return Cover(graph, tuple(kept), tuple(cuts.cheapest(interval) for interval in kept))


def _share(graph: Graph, field: str) -> Floats:
    amounts = np.array([getattr(graph.node_by_id[name], field) for name in graph.order], dtype=float)
    return amounts / max(float(amounts.sum()), 1e-300)


def _ancestors(graph: Graph) -> Bools:
    """`ancestors[u, v]`: u is v or a predecessor of v, directly or not."""
    position = {name: n for n, name in enumerate(graph.order)}
    ancestors = np.eye(len(graph.order), dtype=bool)
    for name in graph.order:
        for predecessor in graph.predecessors[name]:
            ancestors[:, position[name]] |= ancestors[:, position[predecessor]]
    return ancestors


def _split(interval: Interval, ancestors: Bools, width: Floats) -> tuple[Interval, Interval]:
    """Split at the node that reduces the width of the wider half the most."""
    free = np.flatnonzero(interval.free)
    among = ancestors[np.ix_(free, free)]
    node = free[int(np.argmax(np.minimum(width[free] @ among, among @ width[free])))]
    return (
        Interval(interval.inside | ancestors[:, node], interval.outside),
        Interval(interval.inside, interval.outside | ancestors[node]),
    )


def _without_ends(interval: Interval, graph: Graph, ancestors: Bools) -> list[Interval]:
    """The interval without the empty and the whole ideal, in several parts if necessary."""
    if not interval.inside.any():
        sources = [n for n, name in enumerate(graph.order) if not graph.predecessors[name]]
        parts, outside = [], interval.outside
        for source in sources:
            if not outside[source]:
                parts.append(Interval(ancestors[:, source], outside))
            outside = outside | ancestors[source]
        return [part for given in parts for part in _without_ends(given, graph, ancestors)]
    if not interval.outside.any():
        sinks = [n for n, name in enumerate(graph.order) if not graph.successors[name]]
        parts, inside = [], interval.inside
        for sink in sinks:
            if not inside[sink]:
                parts.append(Interval(inside, ancestors[sink]))
            inside = inside | ancestors[:, sink]
        return parts
    return [interval]


class _Network:
    """Finds the ideal of an interval with the fewest outgoing bytes, as a minimum cut.

    Flow goes from the nodes inside, through each tensor with its bytes as capacity, to the nodes outside.
    Infinite arcs from a tensor to its consumers count it once, however many are beyond the cut; infinite arcs
    from a consumer back to its sources make the cut an ideal.
    """

    def __init__(self, graph: Graph) -> None:
        position = {name: n for n, name in enumerate(graph.order)}
        tensors: dict[tuple[int, str], tuple[float, list[int]]] = {}
        for edge in graph.edges:
            key = position[edge.source], edge.tensor
            tensors.setdefault(key, (edge.bytes, []))[1].append(position[edge.target])
        self._tensors = [(source, size, targets) for (source, _), (size, targets) in tensors.items()]
        self._nodes = len(graph.order)

    def cheapest(self, interval: Interval) -> CutPoint:
        arcs = self._arcs(interval)
        flow = 0.0
        while True:
            amount = _augment(arcs, self._nodes, self._nodes + 1)
            if not amount:
                break
            flow += amount
        from_source = _reached(arcs, self._nodes, forward=True)
        to_sink = _reached(arcs, self._nodes + 1, forward=False)
        smallest, largest = interval.inside.copy(), ~interval.outside
        for node in np.flatnonzero(interval.free).tolist():
            smallest[node] = node in from_source
            largest[node] = node not in to_sink
        return CutPoint(flow, smallest, largest)

    def _arcs(self, interval: Interval) -> dict[int, dict[int, float]]:
        """Residual capacities; the source represents all nodes inside, the sink all nodes outside."""
        source, sink = self._nodes, self._nodes + 1
        inside, outside = interval.inside.tolist(), interval.outside.tolist()
        vertex = [source if i else sink if o else n for n, (i, o) in enumerate(zip(inside, outside))]
        arcs: dict[int, dict[int, float]] = {source: {}, sink: {}}
        for number, (producer, size, consumers) in enumerate(self._tensors, self._nodes + 2):
            start = vertex[producer]
            ends = {vertex[consumer] for consumer in consumers} - {source}
            if start == sink or not ends or (size == 0 and start == source):
                continue
            _add(arcs, start, number, size)
            for end in ends:
                _add(arcs, number, end, np.inf)
                if end != sink and start != source:
                    _add(arcs, end, start, np.inf)
        return arcs


def _add(arcs: dict[int, dict[int, float]], start: int, end: int, capacity: float) -> None:
    arcs.setdefault(start, {})
    arcs[start][end] = arcs[start].get(end, 0.0) + capacity
    arcs.setdefault(end, {}).setdefault(start, 0.0)


def _augment(arcs: dict[int, dict[int, float]], source: int, sink: int) -> float:
    """Augment along a shortest path; returns the flow, 0 if no path is left."""
    parent = {source: source}
    queue = [source]
    for node in queue:
        for end, capacity in arcs[node].items():
            if capacity > 0 and end not in parent:
                parent[end] = node
                queue.append(end)
        if sink in parent:
            break
    if sink not in parent:
        return 0.0
    path = [sink]
    while path[-1] != source:
        path.append(parent[path[-1]])
    steps = [(start, end) for end, start in pairwise(path)]
    amount = min(arcs[start][end] for start, end in steps)
    for start, end in steps:
        arcs[start][end] -= amount
        arcs[end][start] += amount
    return amount


def _reached(arcs: dict[int, dict[int, float]], origin: int, forward: bool) -> set[int]:
    """The vertices reachable from `origin` through arcs with residual capacity, or that can reach it."""
    visited, stack = {origin}, [origin]
    while stack:
        node = stack.pop()
        for other in arcs[node]:
            left = arcs[node][other] if forward else arcs[other][node]
            if left > 0 and other not in visited:
                visited.add(other)
                stack.append(other)
    return visited
