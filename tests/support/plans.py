"""Plans for jobs in tests: layers cut evenly, whatever they cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plait.measure.profile_job import trace_job
from plait.planner.cluster import machines
from plait.planner.schedules.in_flight import Schedule
from plait.schema.plans.graph import Edge, Graph, Node
from plait.schema.plans.plan import Layout, Plan, Speedups, Stage
from plait.schema.settings import UNVERIFIED, PipelineSettings, TrainSettings
from support.training import digits_job


def straight_layout(replicas: Sequence[int]) -> Layout:
    """Stages with `replicas` replicas each, workers numbered in order."""
    stages, first = [], 0
    for count in replicas:
        stages.append(tuple(range(first, first + count)))
        first += count
    return Layout(tuple(stages))


def planned(
    replicas: tuple[int, ...], schedule: Schedule, microbatches: int = 4, **changes: Any
) -> TrainSettings:
    """A job on the digits, its layers cut into stages of about equal numbers with `replicas` replicas."""
    return placed(straight_layout(replicas), schedule, microbatches, **changes)


def unverified_plan(
    replicas: tuple[int, ...], schedule: Schedule, microbatches: int = 4, **changes: Any
) -> TrainSettings:
    """`planned` without verification and audits (`unverified_job`)."""
    return planned(replicas, schedule, microbatches, **{"verify": UNVERIFIED} | changes)


def placed(layout: Layout, schedule: Schedule, microbatches: int = 4, **changes: Any) -> TrainSettings:
    """The same with the workers of each stage as `layout` has them."""
    return in_stages(digits_job(**{"steps": 20} | changes), layout, schedule, microbatches)


def cut_in_two(
    settings: TrainSettings, schedule: Schedule, microbatches: int, **options: Any
) -> TrainSettings:
    """`settings` in two stages on two workers; `options` are those of a pipeline."""
    return in_stages(settings, straight_layout((1, 1)), schedule, microbatches, **options)


def in_stages(
    settings: TrainSettings, layout: Layout, schedule: Schedule, microbatches: int, **options: Any
) -> TrainSettings:
    """`settings` with a plan that cuts its layers evenly over the stages of `layout`."""
    ids = list(layers_of(settings))
    places = [len(ids) * i // len(layout.stages) for i in range(len(layout.stages) + 1)]
    stages = []
    for a, b, devices in zip(places, places[1:], layout.stages, strict=False):
        stages.append(Stage(tuple(ids[a:b]), len(devices), devices, *[0.0] * 9, 1, 0.0))
    plan = Plan(
        tuple(stages), machines(len(layout.workers), 1e9), schedule, microbatches, 1,
        0.0, 0.0, 0.0, False, 0.0, 0.0,
        Speedups(1.0, 1.0, 1.0), 1.0, False, "",
    )  # fmt: skip
    return replace(settings, pipeline=PipelineSettings(plan, **options))


def with_graph(settings: TrainSettings) -> TrainSettings:
    """The settings of a pipeline with what its layers cost, all the same: another plan may be made of it."""
    assert settings.pipeline is not None
    ids = list(layers_of(settings))
    nodes = tuple(Node(each, "", 1e-3, 2e-3, 1e3, 1e3) for each in ids)
    graph = Graph(nodes, tuple(Edge(a, b, 1e3) for a, b in itertools.pairwise(ids)))
    return replace(settings, pipeline=replace(settings.pipeline, graph=graph))


# The layers of each model that was traced: tracing takes a while, and most jobs here have the same model.
LAYERS: dict[str, dict[str, tuple[str, ...]]] = {}


def layers_of(settings: TrainSettings) -> dict[str, tuple[str, ...]]:
    """The layers of the job's model in order, with their parameters."""
    data = settings.data
    key = repr((settings.model, data.kind, data.options, settings.precision, settings.seed))
    if key not in LAYERS:
        LAYERS[key] = {layer.id: tuple(layer.parameters) for layer in trace_job(settings).layers}
    return LAYERS[key]
