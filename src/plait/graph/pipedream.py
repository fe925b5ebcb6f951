"""PipeDream's text format: profiles and partitions as its tools wrote them.

One node per line, then one edge per line:

    node3 -- Linear(9, 9) -- forward_compute_time=1.000, backward_compute_time=2.000, \
activation_size=[36.0; 4.0], parameter_size=324.000 -- stage_id=0
    <tab>node2 -- node3

Times are milliseconds, sizes bytes; `-- stage_id=k` is present in a partitioned graph. A `Document` keeps
every number as text, so that a file is reproduced byte for byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.core.files import read_text, write_output
from plait.core.shown import shown
from plait.schema.plans.graph import Edge, Graph, GraphError, Node

# Enough for a graph of a hundred thousand layers.
MOST_BYTES = 64_000_000
_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<description>.*) -- forward_compute_time=(?P<forward_ms>[^,]*), "
    r"backward_compute_time=(?P<backward_ms>[^,]*), activation_size=(?P<outputs>[^,]*), "
    r"parameter_size=(?P<parameters>[^, ]*)(?: -- stage_id=(?P<stage>[0-9]+))?"
)
_AMOUNT = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_EDGE = re.compile(r"\t(?P<source>\S+) -- (?P<target>\S+)")
_NODE_FORM = (
    "'id -- description -- forward_compute_time=ms, backward_compute_time=ms, "
    "activation_size=bytes, parameter_size=bytes'"
)


@dataclass(frozen=True)
class Record:
    """One node; the numbers are kept as text."""

    id: str
    description: str
    forward_ms: str
    backward_ms: str
    outputs: str
    parameters: str
    stage: str | None = None

    def __str__(self) -> str:
        line = (
            f"{self.id} -- {self.description} -- forward_compute_time={self.forward_ms}, "
            f"backward_compute_time={self.backward_ms}, activation_size={self.outputs}, "
            f"parameter_size={self.parameters}"
        )
        return line if self.stage is None else f"{line} -- stage_id={self.stage}"

    @property
    def output_sizes(self) -> tuple[str, ...]:
        """The bytes of each output tensor; most operations have one."""
        if self.outputs.startswith("[") and self.outputs.endswith("]"):
            return tuple(self.outputs[1:-1].split("; "))
        return (self.outputs,)

    def node(self) -> Node:
        return Node(
            id=self.id,
            description=self.description,
            forward_s=float(self.forward_ms) / 1000,
            backward_s=float(self.backward_ms) / 1000,
            output_bytes=math.fsum(float(size) for size in self.output_sizes),
            parameter_bytes=float(self.parameters),
        )


@dataclass(frozen=True)
class Document:
    """A whole file: `str(document)` is its text, `graph()` its graph."""

    records: tuple[Record, ...]
    edges: tuple[tuple[str, str], ...]
    ends_with_newline: bool = False

    def __str__(self) -> str:
        lines = [str(record) for record in self.records]
        lines += [f"\t{source} -- {target}" for source, target in self.edges]
        return "\n".join(lines) + ("\n" if self.ends_with_newline else "")

    def graph(self) -> Graph:
        """The costed graph; every edge carries the whole output of its source, as in PipeDream."""
        nodes = tuple(record.node() for record in self.records)
        output_bytes = {node.id: node.output_bytes for node in nodes}
        return Graph(nodes, tuple(Edge(s, t, output_bytes[s]) for s, t in self.edges))

    def stages(self) -> dict[str, int]:
        """The stages by node, for nodes that have one."""
        return {record.id: int(record.stage) for record in self.records if record.stage is not None}


def from_graph(graph: Graph) -> Document:
    """`graph` in PipeDream's format, which has no buffers, saved activations and tensor names."""
    records = (
        Record(
            id=node.id,
            # A node is one line, so line breaks in its description are removed.
            description=" ".join(node.description.split()),
            forward_ms=_number(node.forward_s * 1000),
            backward_ms=_number(node.backward_s * 1000),
            outputs=_number(node.output_bytes),
            parameters=_number(node.parameter_bytes),
        )
        for node in graph.nodes
    )
    pairs = dict.fromkeys((edge.source, edge.target) for edge in graph.edges)
    return Document(tuple(records), tuple(pairs))


def read(path: Path) -> Document:
    """The document in the file `path`."""
    return parse(read_text(path, "a graph in PipeDream's text format", MOST_BYTES, GraphError), str(path))


def write(document: Document, path: Path) -> None:
    """Write `document` to the file `path`."""
    write_output(path, str(document))


def parse(text: str, name: str = "graph") -> Document:
    """Parse `text`; errors give `name`, the line, what was found and expected."""
    ends_with_newline = text.endswith("\n")
    lines = text.removesuffix("\n").split("\n") if text else []
    records: dict[str, Record] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        if line.startswith("\t"):
            edge = _parse_edge(line, where, records)
            if edge in edges:
                raise GraphError(f"{where}: edge {shown(line.strip())} is already on line {edges[edge]}")
            edges[edge] = number
        elif edges:
            raise GraphError(f"{where}: found {_show(line)}, expected an edge (nodes come before edges)")
        else:
            record = _parse_node(line, where)
            if record.id in records:
                raise GraphError(f"{where}: node {shown(record.id)} occurs twice; expected each id once")
            records[record.id] = record
    document = Document(tuple(records.values()), tuple(edges), ends_with_newline)
    _check_for_cycles(document, name)
    return document


def _parse_node(line: str, where: str) -> Record:
    match = _NODE.fullmatch(line)
    if match is None:
        raise GraphError(f"{where}: found {_show(line)}, expected {_NODE_FORM}")
    record = Record(**match.groupdict())
    amounts = {
        "forward_compute_time": (record.forward_ms,),
        "backward_compute_time": (record.backward_ms,),
        "activation_size": record.output_sizes,
        "parameter_size": (record.parameters,),
    }
    for field, numbers in amounts.items():
        for number in numbers:
            if not _AMOUNT.fullmatch(number):
                raise GraphError(
                    f"{where}: {field}: found {shown(number)}, expected a number that is not negative"
                )
    if record.stage is not None and len(record.stage) > 9:
        raise GraphError(f"{where}: stage_id: found {shown(record.stage)}, expected a stage from 0 on")
    return record


def _parse_edge(line: str, where: str, records: Mapping[str, Record]) -> tuple[str, str]:
    match = _EDGE.fullmatch(line)
    if match is None:
        raise GraphError(f"{where}: found {_show(line)}, expected '<tab>from -- to'")
    for end in (match["source"], match["target"]):
        if end not in records:
            raise GraphError(
                f"{where}: there is no node {shown(end)} above; expected the id of one of {len(records)}"
            )
    return match["source"], match["target"]


def _check_for_cycles(document: Document, name: str) -> None:
    try:
        document.graph()
    except GraphError as failure:
        raise GraphError(f"{name}: {failure}") from None


def _show(line: str) -> str:
    if not line:
        return "an empty line"
    return shown(line)


def _number(value: float) -> str:
    """Three decimals as in PipeDream, or more if the value needs them."""
    short = f"{value:.3f}"
    return short if float(short) == value else repr(value)
