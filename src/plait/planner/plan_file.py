"""Saves, loads and validates plans; a file may have been edited by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.core import artefact
from plait.core.errors import PlanError
from plait.core.shown import listed, shown
from plait.schema.plans.graph import MOST
from plait.schema.plans.plan import MOST_MICROBATCHES, Plan, Stage

KIND, VERSION = "plan", 1


def save_plan(plan: Plan, path: Path) -> None:
    """Write `plan` as a versioned JSON file."""
    artefact.save(plan, path, KIND, VERSION)


def load_plan(path: Path) -> Plan:
    """Load the plan at `path`; raises if it cannot be run."""
    try:
        plan = artefact.load(Plan, path, KIND, VERSION)
        check_plan(plan)
    except PlanError as failure:
        raise PlanError(f"{path}: {failure}") from None
    return plan


def check_plan(plan: Plan) -> None:
    """Raise for stages without layers, unknown devices, and impossible numbers."""
    if not plan.stages:
        raise PlanError("found no stages, expected at least one")
    _check_counts(plan)
    _check_amounts(plan, "")
    _check_amounts(plan.speedup_over, "speedup_over.")
    for number, stage in enumerate(plan.stages):
        where = f"stages[{number}]"
        _check_amounts(stage, f"{where}.")
        _check_amounts(stage.tied, f"{where}.tied.")
        _check_stage(stage, plan, where)
    _check_layers(plan)


def _check_counts(plan: Plan) -> None:
    _expect(plan.microbatches, "microbatches", 1, MOST_MICROBATCHES)
    _expect(plan.pipelines, "pipelines", 1, plan.microbatches)
    if plan.depths and len(plan.depths) != len(plan.stages):
        raise PlanError(
            f"depths: found {len(plan.depths)}, expected one for each of {len(plan.stages)} stages"
        )
    for depth in plan.depths:
        _expect(depth, "depths", 1, MOST_MICROBATCHES)


def _check_stage(stage: Stage, plan: Plan, where: str) -> None:
    if not stage.layers:
        raise PlanError(f"{where}.layers: found none, expected at least one")
    for device in stage.devices:
        _expect(device, f"{where}.devices", 0, plan.machines.count - 1)
    if len(set(stage.devices)) < len(stage.devices):
        raise PlanError(f"{where}.devices: found {shown(stage.devices)}, expected each device once")
    _expect(stage.replicas, f"{where}.replicas", len(stage.devices), len(stage.devices))
    if not stage.devices or len(stage.devices) % plan.pipelines:
        raise PlanError(
            f"{where}.devices: found {len(stage.devices)}, expected as many for each of "
            f"{plan.pipelines} pipelines, and at least one"
        )
    _expect(stage.in_flight, f"{where}.in_flight", 1, MOST_MICROBATCHES)


def _check_layers(plan: Plan) -> None:
    layers = [layer for stage in plan.stages for layer in stage.layers]
    if len(set(layers)) < len(layers):
        twice = [layer for layer, count in Counter(layers).items() if count > 1]
        raise PlanError(f"stages: found {listed(twice)} more than once, expected each layer in one stage")


def _check_amounts(value: Any, where: str) -> None:
    """Raise for seconds, bytes and shares that are negative or not finite."""
    for field in dataclasses.fields(value):
        amount = getattr(value, field.name)
        if isinstance(amount, float) and not -1e-6 <= amount <= MOST:
            raise PlanError(f"{where}{field.name}: found {amount:g}, expected a number from 0 to {MOST:g}")


def _expect(found: int, where: str, low: int, high: int) -> None:
    if not low <= found <= high:
        expected = str(low) if low == high else f"{low} to {high}"
        raise PlanError(f"{where}: found {shown(found)}, expected {expected}")


def summary(plan: Plan) -> Mapping[str, Any]:
    """The output of `plait plan --json`: the fields that other programs may rely on."""
    return {
        "bottleneck_s": plan.bottleneck_s,
        "lower_bound_s": plan.lower_bound_s,
        "solve_s": plan.solve_s,
        "exact": plan.exact,
        "stages": [
            {
                "layers": list(stage.layers),
                "replicas": stage.replicas,
                "devices": list(stage.devices),
                "compute_s": stage.compute_s,
                "memory_bytes": stage.memory_bytes,
                "traffic_bytes": stage.traffic_bytes,
            }
            for stage in plan.stages
        ],
        "best_partition": {
            "bottleneck_s": plan.best_partition.bottleneck_s,
            "replicas": list(plan.best_partition.replicas),
        },
        "speedup_over": {
            "single": plan.speedup_over.single,
            "data_parallel": plan.speedup_over.data_parallel,
            "model_parallel": plan.speedup_over.model_parallel,
        },
        "schedule": plan.schedule.value,
        "microbatches": plan.microbatches,
        "pipelines": plan.pipelines,
        "step_s": plan.step_s,
        "idle_share": plan.idle_share,
        "devices_used": plan.devices_used,
        "why": plan.why,
    }
