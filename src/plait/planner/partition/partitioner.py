"""The partitioner: a graph and machines in, stages on devices out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from plait.core.errors import PlanError
from plait.core.shown import shown
from plait.core.units import show_bytes
from plait.graph.contraction import contracted_ideals
from plait.graph.ideals import Ideals, TooManyIdeals, all_ideals
from plait.graph.intervals import cover_ideals
from plait.planner.partition.bounds import lower_bound
from plait.planner.partition.heterogeneous import Placed, kinds_of, solve_mixed
from plait.planner.partition.level_search import Problem, nearly_best
from plait.planner.partition.solver import LevelBlock, Limits, Ranges, level_problem, ranges_of, solve
from plait.planner.schedules.in_flight import Depth, Schedule
from plait.planner.stage_memory import MemorySettings, stage_memory
from plait.schema.plans.cluster import Cluster
from plait.schema.plans.graph import Graph
from plait.schema.plans.plan import MOST_MICROBATCHES

# The maximum number of ideals: all pairs are tried for one level, all triples for inner levels.
_MOST_IDEALS_FLAT = 2000
_MOST_IDEALS_NESTED = 600
# For graphs with too many cuts: cuts along the order of the graph, in addition to the cheapest.
_STEPS_FLAT = 200
_STEPS_NESTED = 50
# A bound is refined until it is this close to the plan, or this many intervals are used.
_NEAR_ENOUGH = 1.03
_INTERVALS = (250, 500, 1000)


@dataclass(frozen=True)
class Settings:
    """The planner's options besides the machines.

    With `microbatches` None the planner chooses; `pipelines` is the number of parallel pipelines; `straight`
    forbids replicas within a pipeline; `chunks` is the number of stages per worker of an interleaved
    pipeline. `hide_messages` allows stages of stash and flush to have more microbatches in flight than 1F1B,
    if that shortens the step and fits; under stash their weights are then older.
    """

    schedule: Schedule = Schedule.STASH
    microbatches: int | None = None
    pipelines: int = 1
    straight: bool = False
    memory: MemorySettings = field(default_factory=MemorySettings)
    chunks: int = 2
    hide_messages: bool = False


@dataclass(frozen=True)
class Partition:
    """The stages of the graph and their devices, with the bottleneck and its lower bound."""

    ideals: Ideals
    stages: tuple[Placed, ...]
    bottleneck_s: float
    lower_bound_s: float
    exact: bool
    solve_s: float


def planning_graph(graph: Graph) -> Graph:
    """`graph` without data loading and unused results, as PipeDream plans it.

    Sources described as `Input...` belong to the loader, and `__getitem__` sinks are unused.
    """
    inputs = [n.id for n in graph.nodes if not graph.predecessors[n.id] and n.description.startswith("Input")]
    graph = graph.without(inputs)
    unused = [
        node.id
        for node in graph.nodes
        if not graph.successors[node.id] and node.description.startswith("__getitem__")
    ]
    return graph.without(unused) if len(unused) < len(graph.nodes) else graph


def make_partition(graph: Graph, machines: Cluster, settings: Settings) -> Partition:
    """The best partition of `graph` (already without its inputs) over `machines`."""
    check(graph, machines, settings)
    started = time.process_time()
    search = _PlanSearch(with_step_costs(graph, settings), machines, settings)
    partition = search.run()
    return replace(partition, solve_s=time.process_time() - started)


def straight_partition(ideals: Ideals, machines: Cluster) -> tuple[Placed, ...]:
    """One device per stage, balanced, without a memory limit: the partition of model parallelism."""
    depth = Depth(Schedule.NONE, machines.count)
    ranges = ranges_of(ideals, stage_memory(ideals, Schedule.NONE, MemorySettings()), depth)
    keep = list(range(len(ideals)))
    problem = level_problem(ranges, ranges.compute_s, keep, machines.flat(), 1, Limits(straight=True))
    choices = nearly_best(problem, math.inf, float(ideals.compute_s[-1]) / machines.count)
    assert choices is not None
    return tuple(Placed(c.start, c.end, (s,)) for s, c in enumerate(choices))


def check(graph: Graph, machines: Cluster, settings: Settings) -> None:
    """Raise PlanError for inputs without any plan; the message says what to change."""
    if not graph.nodes:
        raise PlanError("the graph is empty; expected at least one operation")
    if not graph.compute_s() > 0:
        raise PlanError(f"none of the {len(graph.nodes)} operations takes any time; profile the model first")
    if settings.microbatches is not None and not 1 <= settings.microbatches <= MOST_MICROBATCHES:
        raise PlanError(
            f"found {shown(settings.microbatches)} microbatches, expected 1 to {MOST_MICROBATCHES:,}"
        )
    units = machines.levels[-1].count
    if not 1 <= settings.pipelines <= units:
        raise PlanError(
            f"found {shown(settings.pipelines)} pipelines side by side for {units} "
            f"{'devices' if len(machines.levels) == 1 else 'hosts'}; expected 1 to {units}"
        )
    if settings.microbatches is not None and settings.microbatches < settings.pipelines:
        raise PlanError(
            f"found {settings.microbatches} microbatches for {settings.pipelines} pipelines; each needs at "
            f"least one, so use {settings.pipelines} or more"
        )
    if machines.mixed and settings.pipelines > 1:
        alike = max(len(kind.devices) for kind in kinds_of(machines)[0])
        if alike < settings.pipelines:
            raise PlanError(
                f"{settings.pipelines} pipelines side by side need as many devices alike, but no more than "
                f"{alike} of the {machines.count} are; use at most {alike} pipelines"
            )
    if settings.schedule is Schedule.INTERLEAVED:
        stages = machines.count * settings.chunks
        if settings.pipelines > 1 or machines.mixed:
            raise PlanError(
                f"schedule interleaved runs one pipeline on devices alike, found {settings.pipelines} "
                f"pipelines on {machines.count} {'unlike ' if machines.mixed else ''}devices; "
                f"use another schedule"
            )
        if settings.chunks < 2 or len(graph.nodes) < stages:
            raise PlanError(
                f"schedule interleaved needs {stages} stages ({settings.chunks} for each of "
                f"{machines.count} devices, at least 2), but the model has {len(graph.nodes)} layers; use at "
                f"most {len(graph.nodes) // max(settings.chunks, 2)} devices or another schedule"
            )


def with_step_costs(graph: Graph, settings: Settings) -> Graph:
    """The graph with all costs of a microbatch added to the backward seconds.

    Recomputation repeats each forward, and stash updates the weights after every backward.
    """
    again = 1.0 if settings.memory.recompute else 0.0
    updates = 1.0 if settings.schedule is Schedule.STASH else 0.0
    nodes = (
        replace(node, backward_s=node.backward_s + again * node.forward_s + updates * node.update_s)
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


class _PlanSearch:
    """One planning problem, solved on increasingly large families of cuts."""

    def __init__(self, graph: Graph, machines: Cluster, settings: Settings) -> None:
        self.graph = graph
        self.machines = machines
        self.settings = settings
        levels = machines.levels
        interleaved = settings.schedule is Schedule.INTERLEAVED
        if machines.mixed or interleaved:
            # Different devices, and workers with several stages, are planned as one level.
            count = machines.count * (settings.chunks if interleaved else 1)
            levels = (machines.flat(count),)
        self.levels = levels
        # Memory of different devices is checked stage by stage, that of interleaved stages at the end.
        unlimited = machines.mixed or interleaved
        self.limits = Limits(
            memory_bytes=math.inf if unlimited else machines.smallest_memory_bytes,
            pipelines=settings.pipelines,
            straight=settings.straight or interleaved,
            most_replicas=self._microbatches() or math.inf,
        )

    def _microbatches(self) -> int | None:
        """The microbatches of a step; None for asynchronous schedules, which do not drain."""
        return self.settings.microbatches if self.settings.schedule.synchronous else None

    def run(self) -> Partition:
        most = _MOST_IDEALS_FLAT if len(self.levels) == 1 and not self.machines.mixed else _MOST_IDEALS_NESTED
        try:
            ideals = all_ideals(self.graph, most)
        except TooManyIdeals:
            return self._contracted(most)
        return self._solved(ideals, every_ideal=True)

    def _contracted(self, most: int) -> Partition:
        """The best of a family of cuts, with a lower bound for all others."""
        cover = cover_ideals(self.graph, _INTERVALS[0])
        steps = _STEPS_FLAT if most == _MOST_IDEALS_FLAT else _STEPS_NESTED
        best = self._solved(cover.ideals(steps), every_ideal=False)
        contracted = contracted_ideals(self.graph, most)
        if contracted is not None:
            best = min(
                self._solved(contracted, every_ideal=False),
                best,
                key=lambda partition: partition.bottleneck_s,
            )
        for count in _INTERVALS:
            if self.machines.mixed or best.bottleneck_s <= best.lower_bound_s * _NEAR_ENOUGH:
                break
            cover = cover if count == _INTERVALS[0] else cover_ideals(self.graph, count)
            bound = lower_bound(cover, self.machines.levels, best.bottleneck_s)
            best = replace(best, lower_bound_s=max(best.lower_bound_s, bound))
        return best

    def _solved(self, ideals: Ideals, every_ideal: bool) -> Partition:
        depth = Depth(self.settings.schedule, self.machines.count, self._microbatches())
        deepest = self.machines.count
        memory = stage_memory(ideals, self.settings.schedule, self.settings.memory, deepest)
        ranges = ranges_of(ideals, memory, depth)
        if self.settings.schedule is Schedule.INTERLEAVED:
            # Balance matters most for the many small stages; their messages are simulated later.
            ranges = replace(ranges, crossing_bytes=ranges.crossing_bytes * 0)
        stages, bottleneck, exact = self._place(ranges)
        exact = exact and every_ideal
        speeds = sum(self.machines.device(i).speed for i in range(self.machines.count))
        floor = min(bottleneck, float(ideals.compute_s[-1]) / speeds)
        return Partition(ideals, stages, bottleneck, bottleneck if exact else floor, exact, 0.0)

    def _place(self, ranges: Ranges) -> tuple[tuple[Placed, ...], float, bool]:
        if self.machines.mixed:
            problem = self._flat_problem(ranges)
            mixed = solve_mixed(problem, self.machines)
            if mixed is None:
                raise self._too_small(ranges)
            return mixed.stages, mixed.bottleneck_s, mixed.exact
        solution = solve(ranges, self.levels, self.limits)
        limited = math.isfinite(self.limits.memory_bytes)
        nested = len(self.levels) > 1
        # Inner levels use a conservative memory limit; if it is not active, the result is exact.
        exact = not (limited and nested) or solution == solve(ranges, self.levels, self._unlimited())
        if solution is None and nested:
            self.levels = (self.machines.flat(),)
            solution, exact = solve(ranges, self.levels, self.limits), False
        if solution is None:
            raise self._too_small(ranges)
        sizes = [math.prod(level.count for level in self.levels[:n]) for n in range(len(self.levels))]
        return tuple(_flatten(solution.blocks, sizes, [0])), solution.bottleneck_s, exact

    def _unlimited(self) -> Limits:
        return replace(self.limits, memory_bytes=math.inf)

    def _flat_problem(self, ranges: Ranges) -> Problem:
        keep = list(range(len(ranges.crossing_bytes)))
        return level_problem(ranges, ranges.compute_s, keep, self.machines.flat(), 1, self.limits)

    def _too_small(self, ranges: Ranges) -> PlanError:
        """The error with the memory that a plan would need at least."""
        if self.machines.mixed:
            kinds, _ = kinds_of(self.machines)
            limit = max(kind.memory_bytes for kind in kinds)
        else:
            limit = self.limits.memory_bytes
        who = "the largest device" if self.machines.mixed else "every device"
        flat = (self.machines.flat(),)
        low, high = limit, limit
        while solve(ranges, flat, replace(self.limits, memory_bytes=high)) is None:
            low, high = high, 2 * high
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            if solve(ranges, flat, replace(self.limits, memory_bytes=middle)) is None:
                low = middle
            else:
                high = middle
        hint = "" if self.settings.memory.recompute else ", recompute activations"
        return PlanError(
            f"no plan fits: {who} has {show_bytes(limit)}, and {self.machines.count} devices under "
            f"schedule {self.settings.schedule.value} need about {show_bytes(high)} each; give them more "
            f"memory, use more devices or smaller microbatches{hint}"
        )


def _flatten(blocks: tuple[LevelBlock, ...], sizes: list[int], bases: list[int]) -> list[Placed]:
    """Stages with their devices; `bases` are the first devices of the units that run these blocks.

    A unit of the outermost level has `sizes[-1]` devices; units are in the order of stages.
    """
    placed: list[Placed] = []
    used = 0
    for block in blocks:
        starts = [base + (used + r) * sizes[-1] for base in bases for r in range(block.replicas)]
        used += block.replicas
        if block.parts:
            placed += _flatten(block.parts, sizes[:-1], starts)
        else:
            placed.append(Placed(block.start, block.end, tuple(starts)))
    return placed
