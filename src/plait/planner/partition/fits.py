"""Checks that stages fit into the memory of their devices and that every replica has work."""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.errors import PlanError
from plait.core.units import show_bytes
from plait.schema.plans.cluster import Cluster
from plait.schema.plans.plan import Stage


def check_work(stages: Sequence[Stage], microbatches: int) -> None:
    """Raise PlanError for replicas without work, which only plans over several levels can have."""
    most = max(stage.replicas for stage in stages)
    if most > microbatches:
        raise PlanError(
            f"a stage would have {most} replicas but only {microbatches} microbatches a step; "
            f"use {most} microbatches or more, or fewer devices"
        )


def check_memory(stages: Sequence[Stage], machines: Cluster) -> None:
    """Raise PlanError for a plan that does not fit into memory, if it was made without that limit."""
    problem = misfit(stages, machines)
    if problem is not None:
        device, size, limit = problem
        raise PlanError(
            f"device {device} would need {show_bytes(size)} but has {show_bytes(limit)}; give it more "
            f"memory, use more devices, smaller microbatches or another schedule"
        )


def misfit(stages: Sequence[Stage], machines: Cluster) -> tuple[int, float, float] | None:
    """The first device whose stages do not fit, with the bytes needed and available."""
    needed: dict[int, float] = {}
    for stage in stages:
        for device in stage.devices:
            needed[device] = needed.get(device, 0.0) + stage.memory_bytes
    for device, size in sorted(needed.items()):
        limit = machines.device(device).memory_bytes
        if limit is not None and size > limit * (1 + 1e-6):
            return device, size, limit
    return None
