"""The solver against brute force, PipeDream's own results, and its rules."""

import math
from dataclasses import replace

import pytest
from brute_force import all_plans, best_bottleneck, cost, down_sets
from hypothesis import example, given
from hypothesis import strategies as st

from plait.graph import Graph, Node, pipedream
from plait.graph.ideals import all_ideals
from plait.planner import Level, MemorySettings, Schedule, Settings, machines, make_plan
from plait.planner.partition.partitioner import planning_graph
from plait.planner.partition.solver import LevelBlock, Limits, ranges_of, solve
from plait.planner.schedules.in_flight import Depth
from plait.planner.stage_memory import stage_memory
from support.further import but_further
from support.graphs import PROFILES, chain, graphs

PIPEDREAM = {
    "alexnet": (0.034217, 0.015099, 0.015099),
    "vgg16": (0.205521, 0.054795, 0.067134),
    "resnet18": (0.100004, 0.024425, 0.023493),
    "squeezenet1_0": (0.074414, 0.018772, 0.018618),
    "gnmt": (0.025868, 0.017125, 0.011081),
    "resnet50": (0.162881, 0.043848, 0.043208),
    "resnet101": (0.116555, 0.041819, 0.052715),
}
CLUSTERS = (machines(4, 1e9), machines(16, 1.25e9), machines((4, 4), (10e9, 1.25e9)))
levels = st.builds(
    Level,
    st.integers(1, 4),
    st.integers(1, 40).map(float),
    st.none() | st.integers(1, 40).map(float),
    st.integers(0, 3).map(float),
)


def profile(name: str) -> Graph:
    return planning_graph(pipedream.read(PROFILES / f"{name}.txt").graph())


def solved(
    graph: Graph, given_levels: tuple[Level, ...], limits: Limits | None = None, schedule=Schedule.STASH
):
    ideals = all_ideals(graph, 2000)
    memory = stage_memory(ideals, schedule, MemorySettings())
    depth = Depth(schedule, math.prod(level.count for level in given_levels))
    return ideals, solve(ranges_of(ideals, memory, depth), given_levels, limits or Limits())


def flat(blocks: tuple[LevelBlock, ...]) -> list[tuple[int, int, int]]:
    return [(block.start, block.end, block.replicas) for block in blocks]


@pytest.mark.parametrize(("name", "count"), [("gnmt", 561), ("resnet50", 240), ("resnet101", 410)])
def test_the_ideals_of_the_profiles_are_as_many_as_published(name, count):
    # The published counts leave out the empty ideal.
    assert len(all_ideals(profile(name), 2000)) == count + 1


@given(graphs(layers=5), levels)
def test_no_plan_found_by_brute_force_beats_the_solver(graph, level):
    _, solution = solved(graph, (level,))
    assert solution is not None
    assert solution.bottleneck_s == pytest.approx(best_bottleneck(graph, (level,)), rel=1e-8)


@given(graphs(layers=4), levels, levels)
def test_no_plan_of_two_levels_found_by_brute_force_beats_the_solver(graph, inner, outer):
    inner, outer = replace(inner, count=min(inner.count, 3)), replace(outer, count=min(outer.count, 3))
    _, solution = solved(graph, (inner, outer))
    assert solution is not None
    assert solution.bottleneck_s == pytest.approx(best_bottleneck(graph, (inner, outer)), rel=1e-8)


@given(graphs(layers=5), levels)
def test_the_plan_costs_what_is_claimed_and_covers_the_graph_with_nested_ideals(graph, level):
    ideals, solution = solved(graph, (level,))
    order = ideals.graph.order
    sets = [frozenset(name for name, held in zip(order, row) if held) for row in ideals.members]
    plan = [(sets[start], sets[end], replicas) for start, end, replicas in flat(solution.blocks)]
    assert plan[0][0] == frozenset()
    assert plan[-1][1] == frozenset(order)
    assert all(start < end for start, end, _ in plan)
    assert sum(replicas for _, _, replicas in plan) <= level.count
    claimed = cost(graph, plan, level, 1, lambda start, end: graph.compute_s(end - start))
    assert claimed == pytest.approx(solution.bottleneck_s)


# The plan that would need less without it needs more with the copy that its replicas sum in.
@example(
    Graph((Node("n0", "", 0, 0, 0, 2, activation_bytes=2), Node("n1", "", 0, 0.3, 0, 3)), ()),
    Level(3, 21.0),
)
@given(graphs(layers=4), levels)
def test_equal_bottlenecks_are_decided_by_fewer_stages_then_memory_then_devices(graph, level):
    ideals, solution = solved(graph, (level,))
    memory = stage_memory(ideals, Schedule.STASH, MemorySettings())
    sets = [frozenset(n for n, held in zip(ideals.graph.order, row) if held) for row in ideals.members]
    place = {ideal: n for n, ideal in enumerate(sets)}

    def rank(plan):
        peak, devices = 0.0, 0
        for start, end, replicas in reversed(plan):
            devices += replicas
            held = math.ceil(devices / replicas)
            peak = max(peak, memory.at(place[start], place[end], held, replicas))
        return len(plan), peak, devices

    def seconds(start, end):
        return graph.compute_s(end - start)

    everything = frozenset(graph.order)
    tied = [
        rank(plan)
        for plan in all_plans(down_sets(graph), frozenset(), everything, level.count)
        if cost(graph, plan, level, 1, seconds) <= solution.bottleneck_s * (1 + 1e-9)
    ]
    found = rank([(sets[start], sets[end], replicas) for start, end, replicas in flat(solution.blocks)])
    best = min(tied)
    assert found[0] == best[0]
    assert found[1] == pytest.approx(best[1], rel=1e-4)
    close = [devices for stages, peak, devices in tied if stages == best[0] and peak <= best[1] * (1 + 1e-9)]
    assert found[2] <= min(close)


@given(graphs(layers=4), levels, st.sampled_from([Schedule.STASH, Schedule.TWO_BUFFERED, Schedule.FLUSH]))
def test_a_memory_limit_leaves_the_best_plan_that_fits(graph, level, schedule):
    ideals, free = solved(graph, (level,), schedule=schedule)
    memory = stage_memory(ideals, schedule, MemorySettings())
    sets = [frozenset(n for n, held in zip(ideals.graph.order, row) if held) for row in ideals.members]
    place = {ideal: n for n, ideal in enumerate(sets)}

    def peak(plan):
        most, devices = 0.0, 0
        for start, end, replicas in reversed(plan):
            devices += replicas
            depth = math.ceil(devices / replicas)
            most = max(most, memory.at(place[start], place[end], depth, replicas))
        return most

    def seconds(start, end):
        return graph.compute_s(end - start)

    plans = list(all_plans(down_sets(graph), frozenset(), frozenset(graph.order), level.count))
    peaks = sorted({peak(plan) for plan in plans})
    limit = peaks[len(peaks) // 3] + 1e-3
    fitting = [cost(graph, plan, level, 1, seconds) for plan in plans if peak(plan) <= limit]
    _, found = solved(graph, (level,), Limits(memory_bytes=limit), schedule)
    assert found is not None
    assert found.bottleneck_s == pytest.approx(min(fitting), rel=1e-8)
    assert peak([(sets[a], sets[b], r) for a, b, r in flat(found.blocks)]) <= limit
    _, none = solved(graph, (level,), Limits(memory_bytes=peaks[0] - 1e-3), schedule)
    assert none is None
    assert free.bottleneck_s <= found.bottleneck_s * (1 + 1e-9)


@pytest.mark.parametrize("name", but_further(PIPEDREAM, "gnmt", "resnet101"))
def test_the_bottleneck_is_at_most_pipedreams(name):
    graph = profile(name)
    for cluster, published in zip(CLUSTERS, PIPEDREAM[name]):
        _, solution = solved(graph, cluster.levels)
        # Published to six decimals.
        assert solution.bottleneck_s <= published + 5e-7


def test_pipelines_side_by_side_replicate_every_stage_alike():
    graph = chain([1.0] * 6, 10.0, 1.0)
    plan = make_plan(graph, machines(6, 100.0), Settings(pipelines=3))
    assert all(stage.replicas % 3 == 0 for stage in plan.stages)
    devices = [device for pipeline in range(3) for ids in plan.layout(pipeline).stages for device in ids]
    assert sorted(devices) == sorted(device for stage in plan.stages for device in stage.devices)


def test_a_straight_pipeline_has_one_device_a_stage():
    plan = make_plan(chain([1.0] * 6, 1.0, 100.0), machines(4, 100.0), Settings(straight=True))
    assert [stage.replicas for stage in plan.stages] == [1] * len(plan.stages)
    # Stages of 2, 1, 1 and 2 layers: the best that six equal layers on four devices allow.
    assert plan.bottleneck_s == pytest.approx(4.0)


def test_no_stage_has_more_replicas_than_microbatches():
    graph = chain([1.0, 1.0], 1000.0, 0.0)
    assert [s.replicas for s in make_plan(graph, machines(4, 1.0)).stages] == [4]
    few = make_plan(graph, machines(4, 1.0), Settings(schedule=Schedule.FLUSH, microbatches=3))
    assert [s.replicas for s in few.stages] == [3]


def test_a_plan_for_hosts_places_the_stages_of_a_host_on_its_own_devices():
    graph = chain([1.0] * 4, 100.0, 0.0)
    # Between hosts only the cheap cut in the middle can be afforded, and only by two devices.
    nodes = tuple(replace(n, output_bytes=10.0) if n.id == "n1" else n for n in graph.nodes)
    edges = tuple(replace(e, bytes=10.0) if e.source == "n1" else e for e in graph.edges)
    plan = make_plan(Graph(nodes, edges), machines((2, 2), (1000.0, 11.0)), Settings(straight=True))
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (2,), (3,)]
    assert [stage.layers for stage in plan.stages] == [("n0",), ("n1",), ("n2",), ("n3",)]
