import pytest
from hypothesis import given, settings

from plait.graph import Graph, GraphError, pipedream
from support.graphs import PROFILES, graphs

NODE = (
    "node1 -- Linear -- forward_compute_time=1.000, backward_compute_time=2.500, "
    "activation_size=[8.0; 4.0], parameter_size=16.000"
)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.txt")), ids=lambda path: path.stem)
def test_every_profile_comes_back_byte_for_byte(path, tmp_path):
    document = pipedream.read(path)
    pipedream.write(document, tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_bytes() == path.read_bytes()


def test_nine_profiles_are_there():
    assert len(list(PROFILES.glob("*.txt"))) == 9


def test_lists_are_summed_and_milliseconds_become_seconds():
    (node,) = pipedream.parse(NODE).graph().nodes
    assert (node.output_bytes, node.forward_s, node.backward_s, node.parameter_bytes) == (
        12,
        0.001,
        0.0025,
        16,
    )


def test_a_time_that_three_decimals_cannot_hold_is_written_in_full():
    (node,) = pipedream.parse(NODE.replace("1.000", "0.33333333")).graph().nodes
    text = str(pipedream.from_graph(Graph((node,), ())))
    assert "forward_compute_time=0.33333333," in text
    assert "backward_compute_time=2.500," in text


def test_stages_are_read_and_written():
    document = pipedream.read(PROFILES / "vgg16_partitioned.txt")
    stages = document.stages()
    assert len(stages) == 41
    assert pipedream.parse(str(document)).stages() == stages
    assert "stage_id" not in str(pipedream.from_graph(document.graph()))


@given(graphs(layers=6, some_work=False))
@settings(max_examples=40, deadline=None)
def test_a_graph_written_in_pipedreams_words_keeps_its_costs_and_edges(graph):
    again = pipedream.parse(str(pipedream.from_graph(graph))).graph()
    assert [n.id for n in again.nodes] == [n.id for n in graph.nodes]
    assert [n.forward_s for n in again.nodes] == pytest.approx([n.forward_s for n in graph.nodes], rel=1e-15)
    assert [n.parameter_bytes for n in again.nodes] == [n.parameter_bytes for n in graph.nodes]
    assert again.edges == graph.edges


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", r"g:1: found 'hello', expected 'id -- description"),
        (NODE + "\n\n", r"g:2: found an empty line"),
        (NODE.replace("1.000", "fast"), r"g:1: forward_compute_time: found 'fast', expected a number"),
        (NODE.replace("16.000", "-16.000"), r"g:1: parameter_size: found '-16.000'"),
        (NODE.replace("4.0]", "x]"), r"g:1: activation_size: found 'x'"),
        (NODE.replace("1.000", "١"), r"g:1: forward_compute_time: found '١', expected a number"),
        (
            NODE.replace("16.000", "1e308"),
            r"g: node 'node1': parameter_bytes: found 1e\+308, expected a number",
        ),
        (NODE.replace("16.000", "1e999"), r"parameter_bytes: found inf, expected a number from 0 to 1e\+18"),
        (NODE.replace("1.000", "1" * 5000), r"forward_s: found inf, expected a number"),
        (NODE + " -- stage_id=" + "9" * 5000, r"g:1: stage_id: found '999.*, expected a stage from 0 on"),
        (NODE + "\n\tnode1 -- " + "x" * 5000, r"g:2: there is no node 'xxx"),
        (NODE + "\n" + NODE, r"g:2: node 'node1' occurs twice"),
        (NODE + "\n\tnode1 -- node7", r"g:2: there is no node 'node7' above"),
        (NODE + "\n\tnode1", r"g:2: found '\\tnode1', expected '<tab>from -- to'"),
        (NODE + "\n\tnode1 -- node1", r"g: the graph has a cycle: node1 -> node1"),
        (
            NODE + "\n" + NODE.replace("node1", "node2") + "\n\tnode1 -- node2\n\tnode2 -- node1",
            r"cycle: node. -> node. -> node.",
        ),
        (
            NODE + "\n" + NODE.replace("node1", "node2") + "\n\tnode1 -- node2\n" + NODE,
            r"g:4: .*expected an edge",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_line_found_and_expected(text, message):
    with pytest.raises(GraphError, match=message) as caught:
        pipedream.parse(text, "g")
    assert len(str(caught.value)) < 500


def test_a_missing_and_a_binary_file_are_distinguished(tmp_path):
    with pytest.raises(GraphError, match="no such file"):
        pipedream.read(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match="not a text file"):
        pipedream.read(tmp_path / "binary")
