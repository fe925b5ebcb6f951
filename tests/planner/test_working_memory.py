"""What a layer at work takes beyond what is kept: of every stage at once, and of one alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.graph.ideals import all_ideals
from plait.planner import Schedule, Settings, machines, make_plan
from plait.planner.stage_memory import MemorySettings, stage_memory, working_bytes
from plait.schema.plans.graph import Graph
from support.graphs import chain, graphs


def _chain_that_keeps(amounts: list[int]) -> Graph:
    graph = chain([1.0] * len(amounts))
    nodes = [replace(node, activation_bytes=float(own)) for node, own in zip(graph.nodes, amounts)]
    return replace(graph, nodes=tuple(nodes))


CHAINS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(_chain_that_keeps)


@given(st.one_of(graphs(), CHAINS), st.data(), st.sampled_from(list(Schedule)))
def test_the_working_memory_of_all_stages_is_that_of_each(
    graph: Graph, data: st.DataObject, schedule: Schedule
) -> None:
    amounts = [data.draw(st.integers(0, 30)) for _ in range(2 * len(graph.nodes))]
    nodes = [
        replace(node, working_bytes=float(amounts[2 * i]), adding_bytes=float(amounts[2 * i + 1]))
        for i, node in enumerate(graph.nodes)
    ]
    ideals = all_ideals(replace(graph, nodes=tuple(nodes)), 1000)
    at_rest = all_ideals(graph, 1000)
    settings = MemorySettings()
    more = stage_memory(ideals, schedule, settings).fixed - stage_memory(at_rest, schedule, settings).fixed
    for start in range(len(ideals)):
        for end in range(start + 1, len(ideals)):
            if ideals.nested[start, end]:
                own = [ideals.graph.node_by_id[name] for name in ideals.between(start, end)]
                assert more[start, end] == pytest.approx(working_bytes(own, schedule))


@given(graphs(), st.data())
def test_where_stages_are_too_many_their_working_memory_is_never_predicted_too_low(
    graph: Graph, data: st.DataObject
) -> None:
    nodes = [replace(node, working_bytes=float(data.draw(st.integers(0, 30)))) for node in graph.nodes]
    # Beside it a layer that nobody waits for: no chain, whatever was drawn.
    beside = replace(graph.nodes[0], id="beside")
    ideals = all_ideals(replace(graph, nodes=(*nodes, beside)), 1000)
    exact = stage_memory(ideals, Schedule.FLUSH, MemorySettings()).fixed
    bound = stage_memory(ideals, Schedule.FLUSH, MemorySettings(), exact_limit=0).fixed
    assert (bound >= exact - 1e-9)[ideals.nested].all()


def test_a_later_stage_needs_nothing_for_a_greedy_layer_of_an_earlier_one() -> None:
    graph = chain([1.0, 1.0], output_bytes=10.0)
    greedy = replace(graph.nodes[0], working_bytes=1000.0)
    settings = Settings(Schedule.FLUSH, 4, straight=True)
    plan = make_plan(replace(graph, nodes=(greedy, graph.nodes[1])), machines(2, 1e9), settings)
    assert [len(stage.layers) for stage in plan.stages] == [1, 1]
    assert [stage.working_bytes for stage in plan.stages] == [990.0, 0.0]


def test_gradients_that_are_added_count_where_they_add_up() -> None:
    graph = chain([1.0, 1.0], output_bytes=10.0)
    nodes = [replace(node, working_bytes=15.0, adding_bytes=7.0) for node in graph.nodes]
    assert working_bytes(nodes, Schedule.STASH) == 5.0
    assert working_bytes(nodes, Schedule.FLUSH) == 12.0
