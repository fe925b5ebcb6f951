"""PipeDream's objective written out plainly: every chain of nested ideals, every way to replicate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from plait.graph import Graph
from plait.planner import Level

Set = frozenset[str]
Seconds = Callable[[Set, Set], float]


def down_sets(graph: Graph) -> list[Set]:
    names = [node.id for node in graph.nodes]
    subsets = itertools.chain.from_iterable(itertools.combinations(names, r) for r in range(len(names) + 1))
    closed = (frozenset(s) for s in subsets)
    return [s for s in closed if all(e.source in s for e in graph.edges if e.target in s)]


def all_plans(ideals: list[Set], start: Set, end: Set, devices: int) -> Iterator[list[tuple[Set, Set, int]]]:
    """Every sequence of stages from `start` to `end` on at most `devices` devices."""
    if start == end:
        yield []
        return
    for middle in ideals:
        if start < middle <= end:
            for replicas in range(1, devices + 1):
                for rest in all_plans(ideals, middle, end, devices - replicas):
                    yield [(start, middle, replicas), *rest]


def cost(graph: Graph, plan: list[tuple[Set, Set, int]], level: Level, below: int, seconds: Seconds) -> float:
    """The bottleneck of one plan at one level; `below` is the machine count of the level below."""
    everything = frozenset(node.id for node in graph.nodes)
    worst = 0.0
    for number, (start, end, m) in enumerate(plan):
        parameters = graph.parameter_bytes(end - start)
        sync = 4 * (m - 1) * parameters / ((level.sum_bytes_per_s or level.bytes_per_s) * m)
        sync += level.sum_latency_s * (m - 1) / m if parameters else 0
        if number == 0:
            worst = max(worst, (seconds(start, end) + sync / below) / m)
            continue
        worst = max(worst, (seconds(start, end) + sync) / m)
        worst = max(worst, 2 * graph.crossing_bytes(start) / (level.bytes_per_s * m))
        if end != everything:
            worst = max(worst, 2 * graph.crossing_bytes(end) / (level.bytes_per_s * m))
    return worst


def best_bottleneck(graph: Graph, levels: tuple[Level, ...]) -> float:
    """The smallest bottleneck of all plans, inner levels first."""
    ideals = down_sets(graph)

    def plain(start: Set, end: Set) -> float:
        return graph.compute_s(end - start)

    seconds: Seconds = plain
    below = 1
    for level in levels:
        seconds, below = _of_level(graph, ideals, level, below, seconds), level.count
    return seconds(frozenset(), frozenset(node.id for node in graph.nodes))


def _of_level(graph: Graph, ideals: list[Set], level: Level, below: int, seconds: Seconds) -> Seconds:
    known: dict[tuple[Set, Set], float] = {}

    def best(start: Set, end: Set) -> float:
        if (start, end) not in known:
            plans = all_plans(ideals, start, end, level.count)
            known[start, end] = min(cost(graph, plan, level, below, seconds) for plan in plans)
        return known[start, end]

    return best
