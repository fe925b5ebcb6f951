"""A model as a directed acyclic graph of operations with measured costs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from plait.core import artefact
from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.core.shown import listed, shortened, shown

KIND, VERSION = "graph", 1
# The limit of bytes and seconds: sums and quotients of such numbers do not overflow.
MOST = 1e18


class GraphError(InputError):
    """A wrong graph: unknown or duplicate names, negative costs, a cycle."""


@dataclass(frozen=True)
class Node:
    """One operation (or layer) of the model, with its costs for one microbatch.

    `output_bytes` counts all tensors it returns, and `activation_bytes` what autograd keeps until the
    backward pass. `update_s` is the optimizer's time for its parameters, and `version_s` the additional time
    if microbatches in flight still need the old weights. `working_bytes` is the temporary memory of the
    operation, and `adding_bytes` the additional memory if its gradients are added to existing ones (0 if not
    measured).
    """

    id: str
    description: str
    forward_s: float
    backward_s: float
    output_bytes: float
    parameter_bytes: float
    buffer_bytes: float = 0.0
    activation_bytes: float = 0.0
    update_s: float = 0.0
    working_bytes: float = 0.0
    version_s: float = 0.0
    adding_bytes: float = 0.0

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


# The costs of a node.
_AMOUNTS = tuple(field.name for field in fields(Node) if field.name not in ("id", "description"))


@dataclass(frozen=True)
class Edge:
    """A tensor that goes from `source` to `target`.

    Edges of one source with the same `tensor` name carry the same tensor: it is sent to another stage once,
    however many consumers it has there. The default name stands for the whole output of the source. `kept`
    says that the target's activation bytes include the tensor, so a stage that receives it needs no more
    memory for it.
    """

    source: str
    target: str
    bytes: float
    tensor: str = ""
    kept: bool = False


@dataclass(frozen=True)
class Tie:
    """A parameter that several nodes use. Its bytes count for the first node; other stages hold copies."""

    bytes: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Nodes, edges and ties, checked when made: names are unique and known, costs finite, and no cycle."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)
        _check_edges(self.edges, self.node_by_id)
        _check_ties(self.ties, self.node_by_id)
        if len(self.order) < len(self.nodes):
            cycle = _find_cycle(self)
            raise GraphError(
                f"the graph has a cycle: {shortened(' -> '.join(cycle), 500)}; expected operations in an "
                f"order of execution"
            )

    @cached_property
    def node_by_id(self) -> dict[str, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def predecessors(self) -> dict[str, tuple[str, ...]]:
        """Direct predecessors of each node, each once, in the order of the edges."""
        return _neighbours(self.nodes, ((edge.target, edge.source) for edge in self.edges))

    @cached_property
    def successors(self) -> dict[str, tuple[str, ...]]:
        """Direct successors of each node, each once, in the order of the edges."""
        return _neighbours(self.nodes, ((edge.source, edge.target) for edge in self.edges))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """A topological order of the node ids.

        Depth first from the sources in the order of `nodes`: branches stay together, and the order of a graph
        is always the same.
        """
        waiting = {node.id: len(self.predecessors[node.id]) for node in self.nodes}
        ready = [node.id for node in reversed(self.nodes) if waiting[node.id] == 0]
        order: list[str] = []
        while ready:
            current = ready.pop()
            order.append(current)
            for successor in reversed(self.successors[current]):
                waiting[successor] -= 1
                if waiting[successor] == 0:
                    ready.append(successor)
        return tuple(order)

    def compute_s(self, ids: Iterable[str] | None = None) -> float:
        """Forward and backward seconds of the nodes named, or of all."""
        return math.fsum(node.compute_s for node in self._chosen(ids))

    def parameter_bytes(self, ids: Iterable[str] | None = None) -> float:
        """Parameter bytes of the nodes named, or of all."""
        return math.fsum(node.parameter_bytes for node in self._chosen(ids))

    def crossing_bytes(self, before: Iterable[str]) -> float:
        """Bytes that go from the nodes in `before` to the others; each tensor counts once."""
        inside = set(before)
        tensors = {
            (edge.source, edge.tensor): edge.bytes
            for edge in self.edges
            if edge.source in inside and edge.target not in inside
        }
        return math.fsum(tensors.values())

    def without(self, ids: Iterable[str]) -> Graph:
        """The graph without the nodes named, the edges that touch them, and their part in ties."""
        gone = set(ids)
        ties = [Tie(t.bytes, tuple(node for node in t.nodes if node not in gone)) for t in self.ties]
        return Graph(
            tuple(node for node in self.nodes if node.id not in gone),
            tuple(edge for edge in self.edges if edge.source not in gone and edge.target not in gone),
            tuple(tie for tie in ties if len(tie.nodes) > 1),
        )

    def _chosen(self, ids: Iterable[str] | None) -> Iterable[Node]:
        return self.nodes if ids is None else (self.node_by_id[i] for i in ids)


def save_graph(graph: Graph, path: Path) -> None:
    """Write `graph` as a versioned JSON file."""
    artefact.save(graph, path, KIND, VERSION)


def load_graph(path: Path) -> Graph:
    """The graph saved at `path`."""
    return artefact.load(Graph, path, KIND, VERSION)


def _neighbours(nodes: Iterable[Node], pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    neighbours_of: dict[str, dict[str, None]] = {node.id: {} for node in nodes}
    for node, neighbour in pairs:
        neighbours_of[node][neighbour] = None
    return {node: tuple(neighbours) for node, neighbours in neighbours_of.items()}


def _check_nodes(nodes: Iterable[Node]) -> None:
    seen: set[str] = set()
    for node in nodes:
        if node.id in seen:
            raise GraphError(f"node {shown(node.id)} occurs twice; expected each id once")
        seen.add(node.id)
        for field in _AMOUNTS:
            if not 0 <= getattr(node, field) <= MOST:
                raise _no_amount(getattr(node, field), f"node {shown(node.id)}: {field}")


def _check_edges(edges: Iterable[Edge], nodes: dict[str, Node]) -> None:
    seen: set[tuple[str, str, str]] = set()
    tensor_bytes: dict[tuple[str, str], float] = {}
    for edge in edges:
        for end in (edge.source, edge.target):
            if end not in nodes:
                raise GraphError(f"{_name(edge)}: there is no node {shown(end)}{did_you_mean(end, nodes)}")
        if (edge.source, edge.target, edge.tensor) in seen:
            raise GraphError(f"{_name(edge)} occurs twice; expected each edge once")
        seen.add((edge.source, edge.target, edge.tensor))
        if not 0 <= edge.bytes <= MOST:
            raise _no_amount(edge.bytes, f"{_name(edge)}: bytes")
        first = tensor_bytes.setdefault((edge.source, edge.tensor), edge.bytes)
        if first != edge.bytes:
            raise GraphError(
                f"{_name(edge)}: tensor {shown(edge.tensor)} has {edge.bytes:g} bytes here, {first:g} on "
                f"another edge; expected one size, or another tensor name"
            )


def _name(edge: Edge) -> str:
    return f"edge {shown(edge.source)} -> {shown(edge.target)}"


def _check_ties(ties: Iterable[Tie], nodes: dict[str, Node]) -> None:
    for tie in ties:
        if not 0 <= tie.bytes <= MOST:
            raise _no_amount(tie.bytes, f"a parameter that {listed(tie.nodes)} share: bytes")
        if len(set(tie.nodes)) < 2 or len(set(tie.nodes)) < len(tie.nodes):
            raise GraphError(
                f"found a parameter shared by {shown(tie.nodes)}; expected two nodes or more, each once"
            )
        for name in tie.nodes:
            if name not in nodes:
                hint = did_you_mean(name, nodes)
                raise GraphError(f"a shared parameter: there is no node {shown(name)}{hint}")


def _no_amount(amount: float, name: str) -> GraphError:
    return GraphError(f"{name}: found {amount!r}, expected a number from 0 to {MOST:g}")


def _find_cycle(graph: Graph) -> list[str]:
    """The nodes of one cycle, first node repeated at the end."""
    stuck = {node.id for node in graph.nodes} - set(graph.order)
    current = next(node.id for node in graph.nodes if node.id in stuck)
    path: dict[str, None] = {}
    # Each node that is stuck has a predecessor that is stuck, so walking backward must close a cycle.
    while current not in path:
        path[current] = None
        current = next(p for p in graph.predecessors[current] if p in stuck)
    nodes = list(path)
    return [current, *reversed(nodes[nodes.index(current) :])]
