"""A proven lower bound on the bottleneck of graphs with too many ideals to try all.

Let the ideals be covered by intervals (graph/intervals.py). A plan cuts at ideals I_1 < ... < I_q, each in
one interval, several perhaps in the same. For a stage from a cut in interval a to a cut in interval b the
nodes outside a and inside b lie in it for certain, so T(a, b) and P(a, b), summed over them, are no more
than the stage's true seconds and parameter bytes, and O(a), O(b), the minimum cuts, no more than its
traffic. If the plan's bottleneck is at most z then, with m the replicas of the stage, N the devices and
S = 4P/B + L (L the latency of a sum, where P > 0):

  (1) T(a, b) + S(a, b)(1 - 1/m) <= m z  and  2 O/B <= m z  at its entry and exit, since each term of the
      true cost only grows from these;
  (2) the sum of the true T over all stages is T of the whole graph, so adding up the inequalities of the
      first d devices' stages, T(inside b) + sum of S(a, b)(1 - 1/m) <= d z, and for all of them
      T(graph) + sum of S(a, b)(1 - 1/m) <= N z.

The search below looks for any sequence of intervals and replicas that meets (1) and (2), the least sum of
the S terms first for each interval and number of devices. If there is none, no plan has a bottleneck of z
or less, and z is a lower bound. Inner levels are bounded from below by the seconds of a range divided by
the devices of a machine, which no plan of a machine beats (each stage's cost times its replicas is at
least its seconds, and the replicas add up to the devices).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from plait.graph.ideals import Floats
from plait.graph.intervals import Cover, Interval
from plait.schema.plans.cluster import Level
from plait.schema.plans.graph import Graph

_STEPS = 12


@dataclass(frozen=True, eq=False)
class _Relaxed:
    """Lower bounds of the costs of pairs of intervals; the empty ideal is first, the whole graph last."""

    compute_s: Floats
    sync_s: Floats
    traffic_s: Floats
    before_s: Floats
    after_s: Floats
    devices: int


def lower_bound(cover: Cover, levels: tuple[Level, ...], upper: float) -> float:
    """A lower bound of the bottleneck of all plans, in seconds; `upper` is the bottleneck of a plan."""
    relaxed = _relax(cover, levels)
    lower = min(upper, float(relaxed.before_s[-1]) / relaxed.devices)
    high = upper
    for _ in range(_STEPS):
        middle = (lower + high) / 2
        if _may_exist(relaxed, middle):
            high = middle
        else:
            lower = middle
    return lower


def _relax(cover: Cover, levels: tuple[Level, ...]) -> _Relaxed:
    graph = cover.graph
    nodes = len(graph.order)
    nothing, everything = np.zeros(nodes, dtype=bool), np.ones(nodes, dtype=bool)
    ends = [Interval(nothing, everything), Interval(everything, nothing)]
    intervals = [ends[0], *cover.intervals, ends[1]]
    inside = np.array([interval.inside for interval in intervals], dtype=np.float64)
    outside = np.array([interval.outside for interval in intervals], dtype=np.float64)
    inner_devices = math.prod(level.count for level in levels[:-1])
    seconds = _amounts(graph, "compute_s") / inner_devices
    # If a node is inside the first and outside the second cut, no ideal of the one is a subset of the
    # other's.
    possible = inside @ outside.T == 0
    # Two cuts may be in one interval, except for the empty ideal and the whole graph.
    possible[0, 0] = possible[-1, -1] = False
    compute = np.where(possible, (outside * seconds) @ inside.T, np.inf)
    sync = levels[-1].sync_s((outside * _amounts(graph, "parameter_bytes")) @ inside.T)
    sync[0] /= levels[-2].count if len(levels) > 1 else 1
    crossing = np.array([0.0, *(cut.crossing_bytes for cut in cover.cuts), 0.0])
    traffic = 2 * np.maximum(crossing[:, None], crossing[None, :]) / levels[-1].bytes_per_s
    traffic[0] = 0
    return _Relaxed(compute, sync, traffic, inside @ seconds, outside @ seconds, levels[-1].count)


def _amounts(graph: Graph, field: str) -> Floats:
    return np.array([getattr(graph.node_by_id[name], field) for name in graph.order], dtype=np.float64)


def _may_exist(relaxed: _Relaxed, bottleneck: float) -> bool:
    """Whether some sequence of intervals satisfies both conditions for `bottleneck`."""
    devices = relaxed.devices
    # Tolerance for rounding, so that the bound stays valid.
    limit = bottleneck * (1 + 1e-9)
    stages = []
    for m in range(1, devices + 1):
        sync = relaxed.sync_s * (1 - 1 / m)
        fits = (relaxed.compute_s + sync <= m * limit) & (relaxed.traffic_s <= m * limit)
        stages.append(np.where(fits, sync, np.inf))
    least = np.full((devices + 1, len(relaxed.before_s)), np.inf)
    least[0, 0] = 0
    for d in range(1, devices + 1):
        for m in range(1, d + 1):
            starts = np.flatnonzero(np.isfinite(least[d - m]))
            if len(starts):
                reached = (least[d - m, starts, None] + stages[m - 1][starts]).min(axis=0)
                np.minimum(least[d], reached, out=least[d])
        too_much = (relaxed.before_s + least[d] > d * limit) | (relaxed.after_s > (devices - d) * limit)
        least[d, too_much] = np.inf
    return bool(np.isfinite(least[:, -1]).any())
