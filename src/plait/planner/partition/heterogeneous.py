"""Partitions for devices that differ in speed and memory.

Microbatches are assigned to the replicas of a stage round-robin, so the slowest replica determines the
stage's speed and the smallest its memory limit. Devices of one kind are equal, so a plan is determined by how
many of each kind every stage uses; all such plans are tried, from the last stage to the first.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from plait.graph.ideals import Bools
from plait.planner.partition.level_search import CLOSE, Ints, Problem
from plait.schema.plans.cluster import Cluster

# Beyond this many ways to assign devices, similar kinds are merged.
_MOST_STATES = 150


@dataclass(frozen=True)
class DeviceKind:
    """Devices treated as equal, with the speed of the slowest and the memory of the smallest of them."""

    speed: float
    memory_bytes: float
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """A stage and the devices that replicate it."""

    start: int
    end: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class MixedSolution:
    """The best plan of a mixed cluster; `exact` is False if different devices were merged."""

    bottleneck_s: float
    stages: tuple[Placed, ...]
    exact: bool


def kinds_of(machines: Cluster) -> tuple[list[DeviceKind], bool]:
    """The devices by kind, the fastest first, and whether the devices of each kind are really equal."""
    alike: dict[tuple[float, float], list[int]] = {}
    for index in range(machines.count):
        device = machines.device(index)
        memory = math.inf if device.memory_bytes is None else device.memory_bytes
        alike.setdefault((device.speed, memory), []).append(index)
    kinds = [
        DeviceKind(speed, memory, tuple(alike[speed, memory]))
        for speed, memory in sorted(alike, reverse=True)
    ]
    exact = True
    while math.prod(len(kind.devices) + 1 for kind in kinds) > _MOST_STATES and len(kinds) > 1:
        nearest = min(range(len(kinds) - 1), key=lambda k: kinds[k].speed / kinds[k + 1].speed)
        kinds[nearest : nearest + 2] = [_joined(kinds[nearest], kinds[nearest + 1])]
        exact = False
    return kinds, exact


def _joined(one: DeviceKind, other: DeviceKind) -> DeviceKind:
    return DeviceKind(
        min(one.speed, other.speed),
        min(one.memory_bytes, other.memory_bytes),
        tuple(sorted(one.devices + other.devices)),
    )


def states_of(kinds: list[DeviceKind], unit: int) -> list[tuple[int, ...]]:
    """Every way to choose devices of each kind, in multiples of `unit`."""
    return list(itertools.product(*(range(0, len(kind.devices) + 1, unit) for kind in kinds)))


def solve_mixed(problem: Problem, machines: Cluster) -> MixedSolution | None:
    """The plan with the smallest bottleneck on different devices, or None if memory is too small.

    `problem` is that of a single level; its device count and `straight` are respected.
    """
    kinds, exact = kinds_of(machines)
    search = _Search(problem, kinds)
    if not search.run():
        return None
    bottleneck, choices = search.plan()
    return MixedSolution(bottleneck, tuple(_hand_out(choices, kinds, problem)), exact)


class _Search:
    """best[k, s]: the smallest bottleneck of the stages from ideal k on, with the devices of state s."""

    def __init__(self, problem: Problem, kinds: list[DeviceKind]) -> None:
        self._problem = problem
        self._kinds = kinds
        self._states = states_of(kinds, problem.unit)
        self._index = {state: s for s, state in enumerate(self._states)}
        self._sizes = np.array([sum(state) for state in self._states])
        ideals = len(problem.ideals)
        self._best = np.full((ideals, len(self._states)), np.inf)
        self._best[-1, 0] = 0
        self._choice = np.zeros((ideals, len(self._states), 2), dtype=np.intp)

    def run(self) -> bool:
        takes = [take for take in self._states if self._allowed(take)]
        moves = [(take, *self._moves(take)) for take in takes]
        for k in range(len(self._problem.ideals) - 2, -1, -1):
            for take, before, after in moves:
                self._extend(k, take, before, after)
        return bool(np.isfinite(self._best[0]).any())

    def _allowed(self, take: tuple[int, ...]) -> bool:
        return sum(take) == self._problem.unit if self._problem.straight else sum(take) > 0

    def _moves(self, take: tuple[int, ...]) -> tuple[Ints, Ints]:
        """States after the stage, and the states with the stage's devices added."""
        pairs = []
        for state in self._states:
            bigger = tuple(a + b for a, b in zip(state, take))
            if bigger in self._index:
                pairs.append((self._index[state], self._index[bigger]))
        follow, become = zip(*pairs)
        return np.array(follow), np.array(become)

    def _extend(self, k: int, take: tuple[int, ...], follow: Ints, become: Ints) -> None:
        problem, m = self._problem, sum(take)
        used = [kind for kind, count in zip(self._kinds, take) if count]
        speed = min(kind.speed for kind in used)
        ends = np.flatnonzero(np.isfinite(problem.compute_s[k]))
        seconds = (problem.compute_s[k, ends] / speed + problem.sync_s[k, ends] * (1 - 1 / m)) / m
        seconds = np.maximum(seconds, problem.traffic_s[k, ends] / m)
        total = np.maximum(seconds[:, None], self._best[np.ix_(ends, follow)])
        total[self._too_big(k, ends, m, self._sizes[become], min(kind.memory_bytes for kind in used))] = (
            np.inf
        )
        j = np.argmin(total, axis=0)
        best = total[j, np.arange(len(follow))]
        better = best < self._best[k, become] * (1 - CLOSE)
        self._best[k, become[better]] = best[better]
        self._choice[k, become[better], 0] = ends[j[better]]
        self._choice[k, become[better], 1] = self._index[take]

    def _too_big(self, k: int, ends: Ints, m: int, devices: Ints, limit: float) -> Bools | bool:
        problem = self._problem
        if problem.memory is None or problem.depth is None or math.isinf(limit):
            return False
        depth = np.array([problem.depth.in_flight(int(count), m) for count in devices])
        fixed = problem.memory.fixed[k, ends] + (problem.memory.summed[k, ends] if m > 1 else 0.0)
        needed = fixed[:, None] + depth * problem.memory.each[k, ends, None]
        return np.asarray(needed > limit)

    def plan(self) -> tuple[float, list[tuple[int, int, tuple[int, ...]]]]:
        """The best bottleneck on the fewest devices, as (start, end, devices of each kind)."""
        best = self._best[0]
        close = np.flatnonzero(best <= best.min() * (1 + CLOSE))
        state = self._states[int(close[np.argmin(self._sizes[close])])]
        bottleneck = float(best[self._index[state]])
        choices, k = [], 0
        while k != len(self._problem.ideals) - 1:
            j, taken = self._choice[k, self._index[state]]
            take = self._states[int(taken)]
            choices.append((k, int(j), take))
            state = tuple(a - b for a, b in zip(state, take))
            k = int(j)
        return bottleneck, choices


def _hand_out(
    choices: list[tuple[int, int, tuple[int, ...]]], kinds: list[DeviceKind], problem: Problem
) -> list[Placed]:
    left = [list(kind.devices) for kind in kinds]
    stages = []
    for start, end, take in choices:
        devices = [left[kind].pop(0) for kind, count in enumerate(take) for _ in range(count)]
        stages.append(Placed(problem.ideals[start], problem.ideals[end], tuple(sorted(devices))))
    return stages
