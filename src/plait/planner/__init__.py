"""Plan: a costed graph and a set of machines in, stages with replicas out.

Nothing here runs a model. A plan is data: print it, save it, compare it.
"""

from plait.core.errors import PlanError
from plait.planner.cluster import machines, measured_machines
from plait.planner.explain import describe_plan, render_plan
from plait.planner.partition.partitioner import Settings
from plait.planner.plan_file import load_plan, save_plan, summary
from plait.planner.plan_memory import with_runtime_memory
from plait.planner.plans import (
    data_parallel_plan,
    faster_plan,
    fastest_plan,
    make_plan,
    model_parallel_plan,
)
from plait.planner.predict import predict
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.timeline import draw_plan
from plait.planner.stage_memory import MemorySettings
from plait.schema.plans.cluster import Cluster, Device, Level
from plait.schema.plans.plan import Plan, Stage

__all__ = [
    "Cluster",
    "Device",
    "Level",
    "MemorySettings",
    "Plan",
    "PlanError",
    "Schedule",
    "Settings",
    "Stage",
    "data_parallel_plan",
    "describe_plan",
    "draw_plan",
    "faster_plan",
    "fastest_plan",
    "load_plan",
    "machines",
    "make_plan",
    "measured_machines",
    "model_parallel_plan",
    "predict",
    "render_plan",
    "save_plan",
    "summary",
    "with_runtime_memory",
]
