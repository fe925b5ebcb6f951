"""Small random graphs for property tests, and PipeDream's profiles."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

import plait_bench
from plait.graph import Edge, Graph, Node

PROFILES = Path(plait_bench.__file__).parent / "profiles"


@st.composite
def graphs(draw: st.DrawFn, layers: int = 6, some_work: bool = True) -> Graph:
    """Directed acyclic graphs of up to `layers` nodes, with any number of sources and sinks."""
    count = draw(st.integers(1, layers))
    amount = st.integers(0, 9)
    nodes = [
        Node(
            id=f"n{i}",
            description="",
            forward_s=draw(amount) / 10,
            backward_s=draw(amount) / 10,
            output_bytes=float(draw(amount)),
            parameter_bytes=float(draw(amount)),
            buffer_bytes=float(draw(st.integers(0, 1))),
            activation_bytes=float(draw(amount)),
        )
        for i in range(count)
    ]
    if some_work and not any(node.compute_s for node in nodes):
        nodes[0] = Node("n0", "", 0.1, 0.1, nodes[0].output_bytes, nodes[0].parameter_bytes)
    edges = [
        Edge(f"n{i}", f"n{j}", nodes[i].output_bytes)
        for j in range(count)
        for i in range(j)
        if draw(st.booleans())
    ]
    return Graph(tuple(nodes), tuple(edges))


def chain(seconds: list[float], output_bytes: float = 0.0, parameter_bytes: float = 0.0) -> Graph:
    """A chain of layers that take `seconds` forward and as many backward."""
    nodes = tuple(
        Node(f"n{i}", f"layer {i}", each, each, output_bytes, parameter_bytes, activation_bytes=output_bytes)
        for i, each in enumerate(seconds)
    )
    edges = tuple(Edge(f"n{i}", f"n{i + 1}", output_bytes) for i in range(len(nodes) - 1))
    return Graph(nodes, edges)
