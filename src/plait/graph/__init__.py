"""The costed model graph: operations with seconds and bytes, their order, and where it can be cut.

A `Graph` comes from a profile or from PipeDream's text format, and is saved as JSON. Nothing here depends on
machines: the planner computes the costs of cuts.
"""

from plait.schema.plans.graph import Edge, Graph, GraphError, Node, load_graph, save_graph

__all__ = ["Edge", "Graph", "GraphError", "Node", "load_graph", "save_graph"]
