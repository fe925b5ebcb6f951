"""The costed model graph: operations with their seconds and bytes, their order, and where it may be cut.

A `Graph` enters from a profile or from PipeDream's text format and leaves as the same frozen value, saved
as JSON. Nothing here knows of machines: what a cut costs is the planner's business.
"""

from plait.schema.plans.graph import Edge, Graph, GraphError, Node, load_graph, save_graph

__all__ = ["Edge", "Graph", "GraphError", "Node", "load_graph", "save_graph"]
