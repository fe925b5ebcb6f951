"""PipeDream's partitioning problem, level by level: which ideals to cut at, and how often to replicate.

The innermost level is solved first. Its best bottleneck for every range of ideals is the compute time for the
next level; the outermost level is solved once, for the whole graph, and its stages are then expanded level by
level, each with the slack that the level above allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from plait.graph.ideals import Bools, Floats, Ideals
from plait.planner.partition.level_search import CLOSE, Choice, Problem, partition, tidy
from plait.planner.schedules.in_flight import Depth, Schedule
from plait.planner.stage_memory import StageMemory
from plait.schema.plans.cluster import Level


@dataclass(frozen=True)
class Limits:
    """Constraints of a partition besides the bottleneck."""

    memory_bytes: float = math.inf
    pipelines: int = 1
    straight: bool = False
    most_replicas: float = math.inf


@dataclass(frozen=True)
class LevelBlock:
    """Part of a partition: ideals `start` to `end` on `replicas` units of a level.

    A unit is a device at the innermost level, otherwise a machine that runs `parts` one after another.
    """

    start: int
    end: int
    replicas: int
    parts: tuple[LevelBlock, ...] = ()


@dataclass(frozen=True)
class Solution:
    """The best partition of a family of ideals, and its bottleneck in seconds per microbatch."""

    bottleneck_s: float
    blocks: tuple[LevelBlock, ...]


@dataclass(frozen=True, eq=False)
class Ranges:
    """The costs of every stage of a family of ideals; compute seconds are infinite if there is no stage."""

    compute_s: Floats
    parameter_bytes: Floats
    crossing_bytes: Floats
    memory: StageMemory
    depth: Depth


def ranges_of(ideals: Ideals, memory: StageMemory, depth: Depth) -> Ranges:
    """The costs of every stage between two of the ideals.

    Under stash all stages but the last have microbatches in flight that need the weights before an update.
    """
    compute = ideals.compute_s[None, :] - ideals.compute_s[:, None]
    if depth.schedule is Schedule.STASH:
        graph = ideals.graph
        more = ideals.sums([graph.node_by_id[name].version_s for name in graph.order])
        compute[:, :-1] += more[None, :-1] - more[:, None]
    parameters = ideals.parameter_bytes[None, :] - ideals.parameter_bytes[:, None]
    # Rounding must not make the difference of two sums negative.
    compute = np.where(ideals.nested, np.maximum(compute, 0), np.inf)
    return Ranges(compute, np.maximum(parameters, 0), ideals.crossing_bytes, memory, depth)


def solve(ranges: Ranges, levels: tuple[Level, ...], limits: Limits) -> Solution | None:
    """The partition with the smallest bottleneck, or None if no partition fits into memory.

    With several levels and a memory limit, inner levels are treated as if all devices followed every stage:
    the result fits, but a better one may be missed.
    """
    compute = [ranges.compute_s]
    for index, level in enumerate(levels[:-1]):
        compute.append(_all_ranges(ranges, compute[-1], level, _below(levels, index), limits, levels))
    solver = _Opening(ranges, compute, levels, limits)
    problem = solver.problem(len(levels) - 1, 0, len(ranges.crossing_bytes) - 1, 0)
    # Each stage's cost times its replicas is at least its seconds, at every level.
    floor = float(ranges.compute_s[0, -1]) / math.prod(level.count for level in levels)
    choices = partition(problem, solver.memory_limit(len(levels) - 1), floor)
    if choices is None:
        return None
    blocks = solver.open(problem, choices, len(levels) - 1)
    return Solution(problem.bottleneck(choices), blocks)


def _below(levels: tuple[Level, ...], index: int) -> int:
    """The machine count of the level below, by which PipeDream divides the first stage's synchronisation."""
    return levels[index - 1].count if index else 1


def level_problem(
    ranges: Ranges,
    compute_s: Floats,
    keep: list[int],
    level: Level,
    below: int,
    limits: Limits,
) -> Problem:
    """The problem of one level for the range from `keep[0]` to `keep[-1]`."""
    pairs = np.ix_(keep, keep)
    crossing = 2 * ranges.crossing_bytes[keep] / level.bytes_per_s
    traffic = np.maximum(crossing[:, None], crossing[None, :])
    traffic[0] = 0
    sync = level.sync_s(ranges.parameter_bytes[pairs])
    sync[0] /= below
    return Problem(
        tuple(keep),
        compute_s[pairs],
        sync,
        traffic,
        level.count,
        ranges.memory.restricted(keep),
        ranges.depth,
        unit=limits.pipelines,
        straight=limits.straight,
        most_replicas=limits.most_replicas,
    )


class _Opening:
    """Turns the stages of the outermost level into those of the innermost."""

    def __init__(
        self, ranges: Ranges, compute: list[Floats], levels: tuple[Level, ...], limits: Limits
    ) -> None:
        self._ranges = ranges
        self._compute = compute
        self._levels = levels
        self._limits = limits

    def problem(self, index: int, start: int, end: int, after: int) -> Problem:
        between = np.isfinite(self._ranges.compute_s[start, : end + 1])
        between &= np.isfinite(self._ranges.compute_s[: end + 1, end])
        keep = [start, *np.flatnonzero(between).tolist(), end]
        below = _below(self._levels, index)
        level = self._levels[index]
        # Parallel pipelines are split over the outermost level only.
        limits = self._limits if index == len(self._levels) - 1 else replace(self._limits, pipelines=1)
        problem = level_problem(self._ranges, self._compute[index], keep, level, below, limits)
        # Above the innermost level a unit is a machine, whose memory is checked within it.
        return replace(problem, after=after) if index == 0 else replace(problem, memory=None)

    def memory_limit(self, index: int) -> float:
        return self._limits.memory_bytes if index == 0 else math.inf

    def open(self, problem: Problem, choices: list[Choice], index: int) -> tuple[LevelBlock, ...]:
        """The blocks of `choices`, each expanded to the innermost level."""
        bottleneck = problem.bottleneck(choices) * (1 + CLOSE)
        blocks: list[LevelBlock] = []
        after = problem.after
        for choice in reversed(choices):
            start, end = problem.ideals[choice.start], problem.ideals[choice.end]
            parts: tuple[LevelBlock, ...] = ()
            if index > 0:
                parts = self._parts(problem, choice, index, bottleneck, after)
            blocks.append(LevelBlock(start, end, choice.replicas, parts))
            after += choice.replicas * (math.prod(level.count for level in self._levels[:index]))
        return tuple(reversed(blocks))

    def _parts(
        self, problem: Problem, choice: Choice, index: int, bottleneck: float, after: int
    ) -> tuple[LevelBlock, ...]:
        sync = problem.sync_s[choice.start, choice.end] * (1 - 1 / choice.replicas)
        # The slack that the level above allows; never less than this level's best.
        slack = max(
            bottleneck * choice.replicas - sync,
            problem.compute_s[choice.start, choice.end] * (1 + CLOSE),
        )
        inner = self.problem(
            index - 1,
            problem.ideals[choice.start],
            problem.ideals[choice.end],
            math.ceil(after / choice.replicas),
        )
        choices = tidy(inner, slack, self.memory_limit(index - 1))
        return self.open(inner, choices, index - 1)


def _all_ranges(
    ranges: Ranges,
    compute_s: Floats,
    level: Level,
    below: int,
    limits: Limits,
    levels: tuple[Level, ...],
) -> Floats:
    """The best bottleneck of every range of ideals on one unit of `level`: the next level's compute time.

    best[m][j, i] is the smallest bottleneck of the range i..j on at most m units. The last stage of the range
    is k to j on r units; the ideals j are processed in order, so best[.][k] is complete.
    """
    count = level.count
    whole = level_problem(ranges, compute_s, list(range(len(compute_s))), level, below, limits)
    innermost = compute_s is ranges.compute_s
    devices = math.prod(each.count for each in levels)
    crossing = 2 * ranges.crossing_bytes / level.bytes_per_s
    traffic = np.maximum(crossing[:, None], crossing[None, :])
    sync = level.sync_s(ranges.parameter_bytes)
    best = np.full((count + 1, *compute_s.shape), np.inf)
    last = np.empty((count, *compute_s.shape))
    for m in range(1, count + 1):
        replicas = 1 if limits.straight else m
        fits = _fits(whole, replicas, devices, limits.memory_bytes) if innermost else True
        alone = (compute_s + sync / below * (1 - 1 / replicas)) / replicas
        best[m] = np.minimum(best[m - 1], np.where(fits, alone, np.inf).T)
        if m < count:
            behind = np.maximum((compute_s + sync * (1 - 1 / replicas)) / replicas, traffic / replicas)
            last[m] = np.where(fits, behind, np.inf).T
    for j in range(1, len(compute_s)):
        _extend(best, last, j, count, limits.straight)
    complete: Floats = best[count].T
    return complete


def _extend(best: Floats, last: Floats, j: int, count: int, straight: bool) -> None:
    """Complete best[.][j] with every split of the ranges that end at j."""
    inside = np.flatnonzero(np.isfinite(last[1, j, :j])) if count > 1 else np.arange(0)
    if not len(inside):
        return
    if len(inside) > 0.6 * j:
        chosen: slice | npt.NDArray[np.intp] = slice(0, j)
        shared = best[1:count, :j, :j]
    else:
        # Few ideals are subsets of this one, so gathering them is cheaper than computing all.
        chosen = inside
        shared = best[1:count, inside[:, None], inside[None, :]]
    ends = best[:, j, chosen]
    for r in range(1, 2 if straight else count):
        split = np.maximum(shared[: count - r], last[r, j, chosen, None]).min(axis=1)
        np.minimum(ends[r + 1 :], split, out=ends[r + 1 :])
    best[:, j, chosen] = ends


def _fits(problem: Problem, replicas: int, devices: int, memory_bytes: float) -> Bools | bool:
    if math.isinf(memory_bytes) or problem.memory is None or problem.depth is None:
        return True
    in_flight = problem.depth.in_flight(devices, replicas)
    needed = problem.memory.fixed + in_flight * problem.memory.each
    fits: Bools = needed + (problem.memory.summed if replicas > 1 else 0.0) <= memory_bytes
    return fits
