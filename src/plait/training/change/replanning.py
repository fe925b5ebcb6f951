"""Plans made anew while a run goes on: for other workers, or because some have become slower or faster."""

from __future__ import annotations

from dataclasses import replace

from plait.comm.collectives import broadcast_value
from plait.core.codec import decode, encode
from plait.core.errors import JobError
from plait.graph.graph import Graph
from plait.launch.worker import Worker
from plait.planner import Plan, PlanError
from plait.planner.replan import plan_for
from plait.schema.settings import TrainSettings


def replan_together(worker: Worker, settings: TrainSettings) -> TrainSettings:
    """The settings with a plan for as many workers as there are now; rank 0 makes it for all."""
    assert settings.pipeline is not None
    found = None
    if worker.rank == 0:
        try:
            plan, graph = plan_and_graph(settings)
            made = plan_for(plan, graph, [1.0] * worker.world_size)
            found = {"plan": encode(made), "failure": None}
        except PlanError as failure:
            found = {"plan": None, "failure": str(failure)}
    found = broadcast_value(found, 0)
    if found["failure"] is not None:
        raise JobError(f"parallel.plan: {found['failure']}")
    return replace(settings, pipeline=replace(settings.pipeline, plan=found["plan"]))


def plan_and_graph(settings: TrainSettings) -> tuple[Plan, Graph]:
    """The plan of a run, and what its layers cost."""
    assert settings.pipeline is not None
    if settings.pipeline.graph is None:
        raise PlanError("the run does not know what its layers cost, so no other plan can be made")
    plan = decode(Plan, settings.pipeline.plan, "plan")
    return plan, decode(Graph, settings.pipeline.graph, "graph")
