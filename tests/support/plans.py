"""Plans for jobs in tests: layers cut evenly, whatever they cost."""

from __future__ import annotations

from typing import Any

from plait.core.codec import encode
from plait.planner.depth import Schedule
from plait.planner.machines import machines
from plait.planner.plan import Plan, Speedups, Stage
from plait.runtime.profiling import trace_job
from plait.runtime.settings import PipelineSettings, TrainSettings
from support.training import digits_job


def planned(
    replicas: tuple[int, ...], schedule: Schedule, microbatches: int = 4, **changes: Any
) -> TrainSettings:
    """A job on the digits, its layers cut into stages of about equal numbers with so many replicas."""
    settings = digits_job(steps=20, **changes)
    ids = [layer.id for layer in trace_job(settings).layers]
    places = [len(ids) * i // len(replicas) for i in range(len(replicas) + 1)]
    stages, first = [], 0
    for a, b, count in zip(places, places[1:], replicas, strict=False):
        devices = tuple(range(first, first + count))
        stages.append(Stage(tuple(ids[a:b]), count, devices, *[0.0] * 9, 1, 0.0))
        first += count
    plan = Plan(
        tuple(stages), machines(first, 1e9), schedule, microbatches, 1, 0.0, 0.0, 0.0, False, 0.0, 0.0,
        Speedups(1.0, 1.0, 1.0), 1.0, False, "",
    )  # fmt: skip
    return digits_job(steps=20, pipeline=PipelineSettings(encode(plan)), **changes)
