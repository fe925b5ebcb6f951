import pytest
from hypothesis import given, settings

from plait.core.errors import ArtefactError
from plait.graph import Edge, Graph, GraphError, Node, load_graph, save_graph
from support.graphs import graphs


def node(name: str, **costs: float) -> Node:
    amounts = {"forward_s": 1.0, "backward_s": 2.0, "output_bytes": 8.0, "parameter_bytes": 4.0} | costs
    return Node(id=name, description=name, **amounts)


def test_a_cycle_is_refused_and_names_its_nodes():
    with pytest.raises(GraphError, match="cycle: b -> c -> b|cycle: c -> b -> c"):
        Graph(
            (node("a"), node("b"), node("c")),
            (Edge("a", "b", 1), Edge("b", "c", 1), Edge("c", "b", 1)),
        )


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ((node("a"), node("a")), (), "'a' occurs twice"),
        ((node("layer1"),), (Edge("layer1", "layer2", 1),), "no node 'layer2'; did you mean 'layer1'"),
        ((node("a", forward_s=-1.0),), (), "forward_s: found -1.0"),
        ((node("a", output_bytes=float("nan")),), (), "output_bytes: found nan"),
        (
            (node("a", parameter_bytes=1e308),),
            (),
            r"parameter_bytes: found 1e\+308, expected a number from 0 to",
        ),
        ((node("a"), node("b")), (Edge("a", "b", 1), Edge("a", "b", 1)), "occurs twice"),
        ((node("a"), node("b")), (Edge("a", "b", -1),), "bytes: found -1"),
        ((node("a"), node("b"), node("c")), (Edge("a", "b", 1), Edge("a", "c", 2)), "1 on another edge"),
    ],
)
def test_a_graph_that_cannot_be_is_refused_with_what_was_found(nodes, edges, message):
    with pytest.raises(GraphError, match=message):
        Graph(nodes, edges)


@given(graphs(layers=8, some_work=False))
@settings(max_examples=60, deadline=None)
def test_the_order_puts_every_node_after_its_predecessors(graph):
    place = {name: n for n, name in enumerate(graph.order)}
    assert sorted(place) == sorted(n.id for n in graph.nodes)
    assert all(place[edge.source] < place[edge.target] for edge in graph.edges)


def test_a_tensor_with_several_consumers_beyond_a_cut_crosses_once():
    graph = Graph(
        (node("a"), node("b"), node("c")),
        (Edge("a", "b", 8), Edge("a", "c", 8), Edge("b", "c", 8)),
    )
    assert graph.crossing_bytes(["a"]) == 8
    assert graph.crossing_bytes(["a", "b"]) == 16
    assert graph.crossing_bytes(["a", "b", "c"]) == 0


def test_two_tensors_of_one_node_cross_apart():
    graph = Graph(
        (node("a"), node("b"), node("c")),
        (Edge("a", "b", 5, "hidden"), Edge("a", "c", 3, "state")),
    )
    assert graph.crossing_bytes(["a"]) == 8
    assert graph.crossing_bytes(["a", "b"]) == 3


def test_range_sums_add_what_is_named():
    graph = Graph((node("a"), node("b"), node("c")), ())
    assert graph.compute_s(["a", "c"]) == 6
    assert graph.compute_s() == 9
    assert graph.parameter_bytes(["b"]) == 4


@given(graphs(layers=6, some_work=False))
@settings(max_examples=20, deadline=None)
def test_a_graph_comes_back_from_its_file(tmp_path_factory, graph):
    path = tmp_path_factory.mktemp("graph") / "g.json"
    save_graph(graph, path)
    assert load_graph(path) == graph


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"plait": "plan", "version": 1}')
    with pytest.raises(ArtefactError, match="expected a graph file"):
        load_graph(path)
