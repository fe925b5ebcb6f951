"""The optimizer's time counts where it is spent: under stash after every microbatch, else once a batch."""

import itertools
from dataclasses import replace

import pytest

from plait.planner import Schedule, Settings, machines, make_plan
from plait.schema.plans.graph import Edge, Graph, Node

TWO = machines(2, 1e12)


def chain(last_update_s: float) -> Graph:
    """Four layers of three seconds; the last has weights whose update takes long."""
    names = ["a", "b", "c", "d"]
    updates = [0.0, 0.0, 0.0, last_update_s]
    nodes = [Node(n, n, 1.0, 2.0, 1.0, 1.0, update_s=u) for n, u in zip(names, updates)]
    return Graph(tuple(nodes), tuple(Edge(a, b, 1.0) for a, b in itertools.pairwise(names)))


def test_only_the_last_stage_writes_over_its_weights_under_stash():
    nodes = [replace(node, update_s=0.0, version_s=3.0) for node in chain(0.0).nodes]
    graph = Graph(tuple(nodes), chain(0.0).edges)
    stash = make_plan(graph, TWO, Settings(Schedule.STASH, 4, straight=True))
    # Three seconds a layer, and three more for each layer that is not in the last stage.
    assert [stage.layers for stage in stash.stages] == [("a",), ("b", "c", "d")]
    assert [stage.update_s for stage in stash.stages] == [3.0, 0.0]
    assert stash.bottleneck_s == pytest.approx(9.0)
    flush = make_plan(graph, TWO, Settings(Schedule.FLUSH, 4, straight=True))
    assert [stage.update_s for stage in flush.stages] == [0.0, 0.0]
    buffered = make_plan(graph, TWO, Settings(Schedule.TWO_BUFFERED, 4, straight=True))
    assert [stage.update_s for stage in buffered.stages] == [6.0, 6.0]


def planned(schedule: Schedule, last_update_s: float):
    return make_plan(chain(last_update_s), TWO, Settings(schedule, 4, straight=True))


def test_stash_balances_stages_with_their_updates():
    plan = planned(Schedule.STASH, 6.0)
    assert [stage.layers for stage in plan.stages] == [("a", "b", "c"), ("d",)]
    assert plan.bottleneck_s == pytest.approx(9.0)
    assert plan.step_s == pytest.approx(4 * 9.0)


def test_flush_pays_for_an_update_once_a_batch():
    with_updates, without = planned(Schedule.FLUSH, 6.0), planned(Schedule.FLUSH, 0.0)
    assert [stage.layers for stage in with_updates.stages] == [("a", "b"), ("c", "d")]
    assert with_updates.bottleneck_s == pytest.approx(without.bottleneck_s)
    # The last stage is done before the first, so part of its update is hidden: it takes 6, the drain 4.
    assert with_updates.step_s == pytest.approx(without.step_s + 2.0)
