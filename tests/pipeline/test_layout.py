"""Streams of operations: made as they are needed, and the same as the planner's whole lists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.errors import PlanError
from plait.pipeline.layout import PipelineLayout, stream
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.orders import operations
from plait.schema.plans.plan import Layout
from support.pipelines import AllOf
from support.plans import straight_layout


def arranged(layout: Layout, schedule: Schedule, **changes: object) -> PipelineLayout:
    stages = tuple((f"layer{s}",) for s in range(len(layout.stages)))
    return PipelineLayout(stages, (layout,), schedule, 1, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [Schedule.STASH, Schedule.TWO_BUFFERED])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1, 1), (1, 3), (3, 2), (1, 1, 1, 1), (4,)])
def test_a_stream_is_the_planners_list(replicas: tuple[int, ...], schedule: Schedule) -> None:
    layout = straight_layout(replicas)
    for total, batch in ((1, 1), (5, 1), (12, 1), (23, 1), (23, 7)):
        pipeline_layout = replace(arranged(layout, schedule), microbatches=batch)
        expected = operations(schedule, layout, total, batch=batch)
        for worker in layout.workers:
            assert tuple(stream(pipeline_layout, worker, AllOf(pipeline_layout, total))) == expected[worker]


@pytest.mark.parametrize("schedule", [Schedule.STASH, Schedule.TWO_BUFFERED])
@pytest.mark.parametrize(
    "stages", [((0,), (1,), (0,)), ((0,), (0,), (1,)), ((0, 1), (2,), (1, 0)), ((0,), (0,))]
)
def test_workers_that_hold_several_stages_come_to_the_planners_order_by_themselves(
    stages: tuple[tuple[int, ...], ...], schedule: Schedule
) -> None:
    layout = Layout(stages)
    pipeline_layout = arranged(layout, schedule)
    for total in (1, 5, 12, 23):
        expected = operations(schedule, layout, total)
        for worker in layout.workers:
            assert tuple(stream(pipeline_layout, worker, AllOf(pipeline_layout, total))) == expected[worker]


def test_vertical_sync_that_needs_weights_from_the_future_is_refused() -> None:
    pipeline_layout = arranged(
        straight_layout((1, 1)), Schedule.STASH, vertical_sync=True, depths={0: 2, 1: 5}
    )
    with pytest.raises(PlanError, match="vertical_sync: stage 1 would need version"):
        list(stream(pipeline_layout, 1, AllOf(pipeline_layout, 20)))
