"""One level of the planner's problem: cover a range of ideals with stages on few enough devices.

A stage from ideal k to ideal j on m replicas takes max((T + S(1 - 1/m))/m, X/m) seconds a microbatch,
where T is its compute seconds, S (`Level.sync_s`) the seconds to synchronise its parameters, and X = 2O/B the
larger traffic at its entry and exit. The first stage of a range has X = 0 and S divided by the machine
count of the level below (PipeDream's recurrence, which the brute force in the tests writes out).

The search inverts the question. For a bottleneck z, the fewest replicas that bring a stage under z
have a closed form: (T + S)/m - S/m² falls with m from m = 2 on, so either one replica does, or the larger
root of z m² - (T + S) m + S = 0, rounded up. The fewest devices that cover a suffix then result from one
pass over the ideals, for any number of devices, and z is found by bisection. Memory limits fit into the same
pass: a stage has more microbatches in flight if more devices follow it, so a suffix on fewer devices is never
worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.graph.ideals import Floats
from plait.planner.schedules.in_flight import Depth
from plait.planner.stage_memory import StageMemory

Ints = npt.NDArray[np.intp]

# Relative tolerance: two plans closer than this are equal.
CLOSE = 1e-10


@dataclass(frozen=True)
class Choice:
    """One stage: the nodes between two ideals, on `replicas` devices (or machines of the level below)."""

    start: int
    end: int
    replicas: int


@dataclass(frozen=True, eq=False)
class Problem:
    """Ideals 0..n in order with the cost of every pair; the cost of pairs that are not nested is infinite.

    `after` counts the devices after the range (they deepen the pipeline), replica counts are multiples of
    `unit` (parallel pipelines), `straight` forbids more than one unit per stage, and no stage has more than
    `most_replicas`, so that each has work.
    """

    ideals: tuple[int, ...]
    compute_s: Floats
    sync_s: Floats
    traffic_s: Floats
    devices: int
    memory: StageMemory | None = None
    depth: Depth | None = None
    after: int = 0
    unit: int = 1
    straight: bool = False
    most_replicas: float = math.inf

    def cost(self, choice: Choice) -> float:
        """Seconds per microbatch of one stage; the bottleneck of a plan is the maximum."""
        k, j, m = choice.start, choice.end, choice.replicas
        compute = (self.compute_s[k, j] + self.sync_s[k, j] * (1 - 1 / m)) / m
        return float(max(compute, self.traffic_s[k, j] / m))

    def bottleneck(self, choices: list[Choice]) -> float:
        return max(self.cost(choice) for choice in choices)

    def peak_bytes(self, choices: list[Choice]) -> float:
        """The most memory that any device needs."""
        peak, devices = 0.0, self.after
        for choice in reversed(choices):
            devices += choice.replicas
            peak = max(peak, self.stage_bytes(choice, devices))
        return peak

    def stage_bytes(self, choice: Choice, devices: int) -> float:
        """Memory of one replica of a stage; `devices` counts its own and all later ones."""
        if self.memory is None or self.depth is None:
            return 0.0
        in_flight = self.depth.in_flight(devices, choice.replicas)
        return self.memory.at(choice.start, choice.end, in_flight, choice.replicas)

    def restricted(self, keep: list[int]) -> Problem:
        """The same problem with only the ideals at the positions `keep`."""
        pairs = np.ix_(keep, keep)
        return replace(
            self,
            ideals=tuple(self.ideals[k] for k in keep),
            compute_s=self.compute_s[pairs],
            sync_s=self.sync_s[pairs],
            traffic_s=self.traffic_s[pairs],
            memory=None if self.memory is None else self.memory.restricted(keep),
        )


def partition(problem: Problem, memory_bytes: float, floor_s: float = 0.0) -> list[Choice] | None:
    """The stages with the smallest bottleneck that fit into `memory_bytes`, or None if none fit.

    Ties are broken by fewer stages, then less memory on the fullest device, then fewer devices. The positions
    in the choices are those of `problem`; no bottleneck can be below `floor_s`.
    """
    best = cover(problem, math.inf, memory_bytes)
    if best is None:
        return None
    lower, upper = _bracket(problem, memory_bytes, floor_s, problem.bottleneck(best))
    bottleneck, shrunk, kept = _bisect(problem, memory_bytes, lower, upper)
    choices = tidy(shrunk, bottleneck * (1 + CLOSE), memory_bytes)
    return [Choice(kept[c.start], kept[c.end], c.replicas) for c in choices]


def nearly_best(problem: Problem, memory_bytes: float, floor_s: float) -> list[Choice] | None:
    """Stages within 2% of the smallest bottleneck, without breaking ties: fast, for comparisons."""
    best = cover(problem, math.inf, memory_bytes)
    if best is None:
        return None
    lower, upper = _bracket(problem, memory_bytes, floor_s, problem.bottleneck(best))
    while upper > 1.02 * lower:
        middle = (lower + upper) / 2
        choices = cover(problem, middle, memory_bytes)
        if choices is None:
            lower = middle
        else:
            best, upper = choices, min(middle, problem.bottleneck(choices))
    return cover(problem, upper * (1 + CLOSE), memory_bytes) or best


def _bracket(problem: Problem, memory_bytes: float, lower: float, upper: float) -> tuple[float, float]:
    """Bounds of the smallest bottleneck, searched upwards from the lower bound, which is usually close."""
    step = 0.01
    while lower > 0 and lower * (1 + step) < upper:
        choices = cover(problem, lower * (1 + step), memory_bytes)
        if choices is not None:
            return lower, problem.bottleneck(choices)
        lower *= 1 + step
        step *= 2
    return lower, upper


def _bisect(
    problem: Problem, memory_bytes: float, lower: float, upper: float
) -> tuple[float, Problem, list[int]]:
    """The smallest bottleneck, and the problem restricted to the ideals that such plans can use."""
    kept = list(range(len(problem.ideals)))
    for iteration in range(200):
        if upper - lower <= upper * CLOSE:
            break
        middle = (lower + upper) / 2
        choices = cover(problem, middle, memory_bytes)
        if choices is None:
            lower = middle
        else:
            upper = min(middle, problem.bottleneck(choices))
        if iteration % 6 == 3 and len(kept) > 50:
            reach = _ReachTable(problem, Need(problem, upper * (1 + CLOSE), memory_bytes))
            useful = reach.useful()
            problem, kept = problem.restricted(useful), [kept[k] for k in useful]
    return upper, problem, kept


def tidy(problem: Problem, bottleneck: float, memory_bytes: float) -> list[Choice]:
    """Of the plans within `bottleneck`: fewest stages, then least memory, then fewest devices."""
    reach = _ReachTable(problem, Need(problem, bottleneck, memory_bytes))
    pairs = reach.pairs()
    choices = pairs.fewest_stages(memory_bytes, problem.devices)
    assert choices is not None
    if problem.memory is None:
        return choices
    stages = len(choices)
    lower, upper = 0.0, problem.peak_bytes(choices)
    while upper - lower > upper * 1e-5:
        middle = (lower + upper) / 2
        fewer = pairs.fewest_stages(middle, stages)
        if fewer is None:
            lower = middle
        else:
            choices, upper = fewer, problem.peak_bytes(fewer)
    return choices


def cover(problem: Problem, bottleneck: float, memory_bytes: float) -> list[Choice] | None:
    """Stages on the fewest devices within `bottleneck` and `memory_bytes`, or None if that is impossible."""
    need = Need(problem, bottleneck, memory_bytes)
    last = len(problem.ideals) - 1
    devices = np.full(last + 1, np.inf)
    devices[last] = problem.after
    chosen: list[tuple[int, int]] = [(last, 0)] * (last + 1)
    for k in range(last - 1, -1, -1):
        devices[k], chosen[k] = need.best(k, devices)
    if devices[0] - problem.after > problem.devices:
        return None
    return _walk(chosen, last)


class Need:
    """The fewest replicas of every stage within a bottleneck and a memory limit."""

    def __init__(self, problem: Problem, bottleneck: float, memory_bytes: float) -> None:
        self._problem = problem
        self.few, self.several = fewest_replicas(problem, bottleneck)
        # None without a memory limit.
        self._most: tuple[Floats, Floats] | None = None
        if problem.memory is not None and math.isfinite(memory_bytes):
            self._most = _most_in_flight(problem.memory, (slice(None), slice(None)), memory_bytes)

    def best(self, k: int, devices: Floats) -> tuple[float, tuple[int, int]]:
        """The fewest devices from ideal k on, given those from every later ideal, and the chosen stage."""
        replicas = self.replicas(k, devices)
        total = replicas + devices
        j = int(np.argmin(total))
        if not math.isfinite(total[j]):
            return math.inf, (k, 0)
        return float(total[j]), (j, int(replicas[j]))

    def replicas(self, k: int, devices: Floats) -> Floats:
        """Replicas for the stages from ideal k to each later one, followed by `devices`."""
        if self._most is None:
            row: Floats = self.few[k]
            return row
        alone, shared = self._most
        return fitting_replicas(self._problem, self.few[k], self.several[k], (alone[k], shared[k]), devices)


def _most_in_flight(memory: StageMemory, pairs: tuple[Any, Any], limit: float) -> tuple[Floats, Floats]:
    """Microbatches that fit on a device that is the only replica of a stage, and on one of several."""
    return memory.most_in_flight(pairs, limit, False), memory.most_in_flight(pairs, limit, True)


def fitting_replicas(
    problem: Problem, few: Floats, several: Floats, most_in_flight: tuple[Floats, Floats], after: Floats
) -> Floats:
    """The fewest replicas, at least `few` or else `several`, with at most the allowed number in flight."""
    assert problem.depth is not None
    alone, shared = (problem.depth.fewest_replicas(most, after) for most in most_in_flight)
    enough = np.ceil(np.maximum(several, shared) / problem.unit) * problem.unit
    fitting: Floats = np.where((few == 1) & (alone <= 1), few, _allowed(problem, enough))
    return fitting


def fewest_replicas(problem: Problem, bottleneck: float) -> tuple[Floats, Floats]:
    """For each stage the fewest replicas within `bottleneck` seconds, and the fewest above one."""
    if math.isinf(bottleneck):
        several = np.where(np.isfinite(problem.compute_s), 2.0, np.inf)
        one = np.isfinite(problem.compute_s)
    else:
        total = problem.compute_s + problem.sync_s
        with np.errstate(invalid="ignore"):
            root = total + np.sqrt(np.maximum(total * total - 4 * bottleneck * problem.sync_s, 0))
        root = np.maximum(root / 2, problem.traffic_s) / bottleneck
        # The same tolerance as for one replica, far below CLOSE, so that rounding does not add a replica.
        several = np.maximum(np.ceil(root * (1 - 1e-12)), 2)
        one = np.maximum(problem.compute_s, problem.traffic_s) <= bottleneck * (1 + 1e-12)
    unit = problem.unit
    if unit > 1:
        few = several = np.ceil(several / unit) * unit
    else:
        few = np.where(one, 1.0, several)
    return _allowed(problem, few), several


def _allowed(problem: Problem, replicas: Floats) -> Floats:
    """Replica counts that the problem allows; others become infinite."""
    if problem.straight:
        return np.where(replicas <= problem.unit, float(problem.unit), np.inf)
    return np.where(replicas <= problem.most_replicas, replicas, np.inf)


class _ReachTable:
    """The fewest devices before and after each ideal in a cover within the bottleneck."""

    def __init__(self, problem: Problem, need: Need) -> None:
        last = len(problem.ideals) - 1
        self._problem, self._need = problem, need
        self.after = np.full(last + 1, np.inf)
        self.after[last] = problem.after
        for k in range(last - 1, -1, -1):
            self.after[k], _ = need.best(k, self.after)
        self.before = np.full(last + 1, np.inf)
        self.before[0] = 0
        for k in range(last):
            if math.isfinite(self.before[k]):
                # A lower bound, as it uses the minimum of what can follow.
                reached = self.before[k] + need.replicas(k, self.after)
                np.minimum(self.before, reached, out=self.before)

    def useful(self) -> list[int]:
        """The ideals that some cover uses."""
        total = self.before + self.after - self._problem.after
        return np.flatnonzero(total <= self._problem.devices).tolist()

    def pairs(self) -> _Pairs:
        """The stages that some cover uses."""
        total = self.before[:, None] + self._need.few + self.after - self._problem.after
        starts, ends = np.nonzero(total <= self._problem.devices)
        return _Pairs(self._problem, self._need, starts, ends)


class _Pairs:
    """A selection of stages, as (start, end) sorted by start."""

    def __init__(self, problem: Problem, need: Need, starts: Ints, ends: Ints) -> None:
        self._problem = problem
        self._pairs = (starts, ends)
        self._few, self._several = need.few[starts, ends], need.several[starts, ends]
        self._rows, self._first = np.unique(starts, return_index=True)
        self._lengths = np.diff(np.append(self._first, len(starts)))

    def fewest_stages(self, memory_bytes: float, at_most: int) -> list[Choice] | None:
        """The cover with the fewest stages (at most `at_most`), and among these the fewest devices."""
        problem, (_, ends) = self._problem, self._pairs
        devices = np.full(len(problem.ideals), np.inf)
        devices[-1] = problem.after
        most = None
        if problem.memory is not None and math.isfinite(memory_bytes):
            most = _most_in_flight(problem.memory, self._pairs, memory_bytes)
        layers: list[tuple[Ints, Floats]] = []
        for _ in range(at_most):
            follow, replicas = devices[ends], self._few
            if most is not None:
                replicas = fitting_replicas(problem, self._few, self._several, most, follow)
            total = replicas + follow
            chosen = self._best_of_rows(total)
            nearest = np.zeros(len(devices), dtype=np.intp)
            used = np.zeros(len(devices))
            nearest[self._rows], used[self._rows] = ends[chosen], replicas[chosen]
            devices = np.full(len(devices), np.inf)
            devices[self._rows] = total[chosen]
            layers.append((nearest, used))
            if devices[0] - problem.after <= problem.devices:
                return _walk_layers(layers)
        return None

    def _best_of_rows(self, total: Floats) -> Ints:
        """For each start, the position of its pair with the smallest total."""
        least = np.repeat(np.minimum.reduceat(total, self._first), self._lengths)
        positions = np.where(total == least, np.arange(len(total)), len(total))
        return np.minimum.reduceat(positions, self._first)


def _walk(chosen: list[tuple[int, int]], last: int) -> list[Choice]:
    choices, k = [], 0
    while k != last:
        j, replicas = chosen[k]
        choices.append(Choice(k, j, replicas))
        k = j
    return choices


def _walk_layers(layers: list[tuple[Ints, Floats]]) -> list[Choice]:
    choices, k = [], 0
    for nearest, replicas in reversed(layers):
        choices.append(Choice(k, int(nearest[k]), int(replicas[k])))
        k = int(nearest[k])
    return choices
