"""Ideals, contractions and intervals, compared with all subsets of small graphs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from plait.graph import Graph
from plait.graph.contraction import contracted_ideals
from plait.graph.ideals import Ideals, TooManyIdeals, all_ideals
from plait.graph.intervals import cover_ideals
from support.graphs import chain, graphs


def down_sets(graph: Graph) -> set[frozenset[str]]:
    names = [node.id for node in graph.nodes]
    subsets = itertools.chain.from_iterable(itertools.combinations(names, r) for r in range(len(names) + 1))
    closed = (frozenset(s) for s in subsets)
    return {s for s in closed if all(e.source in s for e in graph.edges if e.target in s)}


def as_sets(ideals: Ideals) -> list[frozenset[str]]:
    order = np.array(ideals.graph.order)
    return [frozenset(order[row].tolist()) for row in ideals.members]


@given(graphs(layers=7, some_work=False))
@settings(max_examples=60, deadline=None)
def test_all_ideals_are_all_down_sets_each_once_smaller_first(graph):
    found = as_sets(all_ideals(graph, 1000))
    assert set(found) == down_sets(graph)
    assert len(found) == len(set(found))
    assert [len(s) for s in found] == sorted(len(s) for s in found)


@given(graphs(layers=6, some_work=False))
@settings(max_examples=40, deadline=None)
def test_sums_crossings_and_nesting_are_those_of_the_sets(graph):
    ideals = all_ideals(graph, 1000)
    sets = as_sets(ideals)
    assert ideals.compute_s.tolist() == pytest.approx([graph.compute_s(s) for s in sets])
    assert ideals.parameter_bytes.tolist() == pytest.approx([graph.parameter_bytes(s) for s in sets])
    assert ideals.crossing_bytes.tolist() == pytest.approx([graph.crossing_bytes(s) for s in sets])
    for i, j in itertools.product(range(len(sets)), repeat=2):
        assert ideals.nested[i, j] == (sets[i] < sets[j])
        if sets[i] < sets[j]:
            assert set(ideals.between(i, j)) == sets[j] - sets[i]


def test_an_enumeration_stops_at_its_limit():
    with pytest.raises(TooManyIdeals):
        all_ideals(Graph(chain([1.0] * 12).nodes, ()), 1000)


@given(graphs(layers=7))
@settings(max_examples=60, deadline=None)
def test_contracting_keeps_only_true_ideals_with_both_ends(graph):
    found = contracted_ideals(graph, 5)
    if found is not None:
        sets = as_sets(found)
        assert set(sets) <= down_sets(graph)
        assert sets[0] == frozenset()
        assert sets[-1] == {node.id for node in graph.nodes}
        assert len(sets) <= 5


def test_a_series_parallel_graph_can_be_contracted_to_a_single_piece():
    names = ["in", "a", "b", "c", "d", "out"]
    base = chain([1.0] * 6)
    nodes = tuple(type(n)(name, "", 1.0, 1.0, 1.0, 1.0) for n, name in zip(base.nodes, names))
    edge = type(base.edges[0])
    pairs = [("in", "a"), ("a", "b"), ("b", "out"), ("in", "c"), ("c", "d"), ("d", "out")]
    graph = Graph(nodes, tuple(edge(s, t, 1.0) for s, t in pairs))
    found = contracted_ideals(graph, 2)
    assert found is not None
    assert len(found) == 2


@given(graphs(layers=7))
@settings(max_examples=60, deadline=None)
def test_intervals_hold_every_ideal_exactly_once_with_the_cheapest_cut_of_each(graph):
    cover = cover_ideals(graph, 4)
    order = np.array(graph.order)
    everything = {node.id for node in graph.nodes}
    inner = [s for s in down_sets(graph) if s and s != everything]
    seen = 0
    for interval, cut in zip(cover.intervals, cover.cuts):
        inside, outside = set(order[interval.inside].tolist()), set(order[interval.outside].tolist())
        held = [s for s in inner if inside <= s and not outside & s]
        seen += len(held)
        assert held
        assert cut.crossing_bytes == pytest.approx(min(graph.crossing_bytes(s) for s in held))
        for ideal in (cut.smallest, cut.largest):
            chosen = frozenset(order[ideal].tolist())
            assert chosen in held
            assert graph.crossing_bytes(chosen) == pytest.approx(cut.crossing_bytes)
    assert seen == len(inner)


@given(graphs(layers=7))
@settings(max_examples=40, deadline=None)
def test_the_family_of_cheap_cuts_holds_only_true_ideals_with_both_ends(graph):
    sets = as_sets(cover_ideals(graph, 4).ideals(steps=3))
    assert set(sets) <= down_sets(graph)
    assert len(sets) == len(set(sets))
    assert sets[0] == frozenset()
    assert sets[-1] == {node.id for node in graph.nodes}
