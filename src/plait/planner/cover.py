"""One level of the planner's problem: cover a range of ideals with stages on few enough devices.

A stage from ideal k to ideal j on m replicas takes max((T + S(1 - 1/m))/m, X/m) seconds a microbatch,
where T is its compute seconds, S = 4P/B the seconds to synchronise its parameters once, and X = 2O/B the
larger traffic at its entry and exit. The first stage of a range has X = 0 and S divided by the machine
count of the level below (PipeDream's recurrence, which the brute force in the tests writes out).

The search turns the question round. For a bottleneck z, the fewest replicas that bring a stage under z
have a closed form: (T + S)/m - S/m² falls with m from m = 2 on, so either one replica does, or the larger
root of z m² - (T + S) m + S = 0, rounded up. The fewest devices that cover a suffix then follow from one
pass over the ideals, whatever the number of devices, and z is found by bisection. Memory fits the same
pass: a stage holds the more microbatches in flight the more devices follow it, so a suffix on fewer devices
is never worse in any respect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from plait.graph.ideals import Floats
from plait.planner.depth import Depth
from plait.planner.memory import StageMemory

Ints = npt.NDArray[np.intp]

# Relative slack for rounding: two plans closer than this count as equal.
CLOSE = 1e-10


@dataclass(frozen=True)
class Choice:
    """One stage: the nodes between two ideals, on `replicas` devices (or machines of the level below)."""

    start: int
    end: int
    replicas: int


@dataclass(frozen=True, eq=False)
class Problem:
    """Ideals 0..n in order with the cost of every pair; pairs that are not nested cost infinitely much.

    `after` counts the devices that follow the range (they deepen the pipeline), `unit` is what replica
    counts are a multiple of (pipelines side by side), `straight` forbids more than one unit a stage, and
    no stage has more than `most_replicas`, so that each gets work.
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
        """Seconds a microbatch of one stage, the bottleneck of a plan being its largest."""
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
        """Memory of one replica of a stage; `devices` counts its own and all that follow."""
        if self.memory is None or self.depth is None:
            return 0.0
        in_flight = self.depth.in_flight(devices, choice.replicas)
        return self.memory.at(choice.start, choice.end, in_flight)

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


def partition(problem: Problem, memory_bytes: float) -> list[Choice] | None:
    """The stages with the smallest bottleneck that fit into `memory_bytes`, or None if none fit.

    Equal bottlenecks are decided by rule: fewer stages, then less memory on the fullest device, then fewer
    devices. The positions in the choices are those of `problem`.
    """
    best = cover(problem, math.inf, memory_bytes)
    if best is None:
        return None
    bottleneck, shrunk, kept = _bisect(problem, best, memory_bytes)
    choices = tidy(shrunk, bottleneck * (1 + CLOSE), memory_bytes)
    return [Choice(kept[c.start], kept[c.end], c.replicas) for c in choices]


def _bisect(problem: Problem, best: list[Choice], memory_bytes: float) -> tuple[float, Problem, list[int]]:
    """The smallest bottleneck, with the problem cut down to the ideals that plans so good can use."""
    lower, upper = 0.0, problem.bottleneck(best)
    lower = min(upper, float(problem.compute_s[0, -1]) / (problem.devices * problem.unit))
    kept = list(range(len(problem.ideals)))
    for iteration in range(200):
        if upper - lower <= upper * CLOSE:
            break
        middle = (lower + upper) / 2
        found = cover(problem, middle, memory_bytes)
        if found is None:
            lower = middle
        else:
            upper = min(middle, problem.bottleneck(found))
        if iteration in (6, 14):
            useful = _useful(problem, upper * (1 + CLOSE), memory_bytes)
            problem, kept = problem.restricted(useful), [kept[k] for k in useful]
    return upper, problem, kept


def tidy(problem: Problem, bottleneck: float, memory_bytes: float) -> list[Choice]:
    """Of the plans within `bottleneck`: fewest stages, then least memory, then fewest devices."""
    kept = _useful(problem, bottleneck, memory_bytes)
    problem = problem.restricted(kept)
    choices = _fewest_stages(problem, bottleneck, memory_bytes, problem.devices)
    assert choices is not None
    if problem.memory is not None:
        choices = _least_memory(problem, bottleneck, choices)
    return [Choice(kept[c.start], kept[c.end], c.replicas) for c in choices]


def _least_memory(problem: Problem, bottleneck: float, choices: list[Choice]) -> list[Choice]:
    """As many stages as `choices`, with the least memory on the fullest device."""
    stages = len(choices)
    lower, upper = 0.0, problem.peak_bytes(choices)
    while upper - lower > upper * 1e-5:
        middle = (lower + upper) / 2
        found = _fewest_stages(problem, bottleneck, middle, stages)
        if found is None:
            lower = middle
        else:
            choices, upper = found, problem.peak_bytes(found)
    return choices


def cover(problem: Problem, bottleneck: float, memory_bytes: float) -> list[Choice] | None:
    """Stages on the fewest devices within `bottleneck` and `memory_bytes`, or None if there are too few."""
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


def _fewest_stages(
    problem: Problem, bottleneck: float, memory_bytes: float, at_most: int
) -> list[Choice] | None:
    """Like `cover`, with as few stages as can be (at most `at_most`) before few devices."""
    need = Need(problem, bottleneck, memory_bytes)
    devices = np.full(len(problem.ideals), np.inf)
    devices[-1] = problem.after
    layers: list[tuple[Ints, Floats]] = []
    for _ in range(min(at_most, problem.devices)):
        replicas = need.replicas(slice(None), devices)
        total = replicas + devices
        nearest = np.argmin(total, axis=1)
        rows = np.arange(len(devices))
        devices = total[rows, nearest]
        layers.append((nearest, replicas[rows, nearest]))
        if devices[0] - problem.after <= problem.devices:
            return _walk_layers(layers)
    return None


class Need:
    """The fewest replicas of every stage within a bottleneck and a memory limit."""

    def __init__(self, problem: Problem, bottleneck: float, memory_bytes: float) -> None:
        self._problem = problem
        self._few, self._several = fewest_replicas(problem, bottleneck)
        self._limit = memory_bytes
        self._limited = problem.memory is not None and math.isfinite(memory_bytes)

    def best(self, k: int, devices: Floats) -> tuple[float, tuple[int, int]]:
        """Fewest devices from ideal k on, given those from every later ideal, with the stage chosen."""
        replicas = self.replicas(slice(k, k + 1), devices)[0]
        total = replicas + devices
        j = int(np.argmin(total))
        if not math.isfinite(total[j]):
            return math.inf, (k, 0)
        return float(total[j]), (j, int(replicas[j]))

    def replicas(self, starts: slice, devices: Floats) -> Floats:
        """Replicas for the stages from the ideals `starts` to each, where `devices` follow."""
        few = self._few[starts]
        if not self._limited:
            return few
        problem = self._problem
        assert problem.memory is not None
        assert problem.depth is not None
        most_in_flight = problem.memory.most_in_flight(starts, self._limit)
        wanted = problem.depth.fewest_replicas(most_in_flight, np.broadcast_to(devices, few.shape))
        several = np.maximum(self._several[starts], wanted)
        several = np.ceil(several / problem.unit) * problem.unit
        return np.where(wanted <= few, few, _allowed(problem, several))


def fewest_replicas(problem: Problem, bottleneck: float) -> tuple[Floats, Floats]:
    """For each stage the fewest replicas that take at most `bottleneck` seconds, and the fewest above one."""
    if math.isinf(bottleneck):
        several = np.where(np.isfinite(problem.compute_s), 2.0, np.inf)
        one = np.isfinite(problem.compute_s)
    else:
        total = problem.compute_s + problem.sync_s
        with np.errstate(invalid="ignore"):
            root = total + np.sqrt(np.maximum(total * total - 4 * bottleneck * problem.sync_s, 0))
        root = np.maximum(root / 2, problem.traffic_s) / bottleneck
        several = np.maximum(np.ceil(root - 1e-9), 2)
        one = np.maximum(problem.compute_s, problem.traffic_s) <= bottleneck * (1 + 1e-12)
    unit = problem.unit
    if unit > 1:
        few = several = np.ceil(several / unit) * unit
    else:
        few = np.where(one, 1.0, several)
    return _allowed(problem, few), several


def _allowed(problem: Problem, replicas: Floats) -> Floats:
    """Replica counts that the problem permits; those that it does not are infinite."""
    if problem.straight:
        return np.where(replicas <= problem.unit, float(problem.unit), np.inf)
    return np.where(replicas <= problem.most_replicas, replicas, np.inf)


def _useful(problem: Problem, bottleneck: float, memory_bytes: float) -> list[int]:
    """The ideals that lie on some cover within the bottleneck, by fewest devices before and after each."""
    need = Need(problem, bottleneck, memory_bytes)
    last = len(problem.ideals) - 1
    after = np.full(last + 1, np.inf)
    after[last] = problem.after
    for k in range(last - 1, -1, -1):
        after[k], _ = need.best(k, after)
    before = np.full(last + 1, np.inf)
    before[0] = 0
    for k in range(last):
        if math.isfinite(before[k]):
            # Counted with the least that can follow: fewer replicas than any plan through k needs.
            np.minimum(
                before[k + 1 :],
                before[k] + need.replicas(slice(k, k + 1), after)[0, k + 1 :],
                out=before[k + 1 :],
            )
    return [k for k in range(last + 1) if before[k] + after[k] - problem.after <= problem.devices]


def _walk(chosen: list[tuple[int, int]], last: int) -> list[Choice]:
    return list(_steps(chosen, last))


def _steps(chosen: list[tuple[int, int]], last: int) -> Iterator[Choice]:
    k = 0
    while k != last:
        j, replicas = chosen[k]
        yield Choice(k, j, replicas)
        k = j


def _walk_layers(layers: list[tuple[Ints, Floats]]) -> list[Choice]:
    choices, k = [], 0
    for nearest, replicas in reversed(layers):
        choices.append(Choice(k, int(nearest[k]), int(replicas[k])))
        k = int(nearest[k])
    return choices
