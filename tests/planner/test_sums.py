"""Replicas sum their gradients at a speed of its own, which the planner knows where it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.planner import (
    Cluster,
    PlanError,
    Schedule,
    Settings,
    data_parallel_plan,
    machines,
    make_plan,
    measured_machines,
)
from plait.planner.predict import predict
from plait.planner.schedules.operations import Update
from plait.planner.schedules.orders import operations
from plait.profiler.link_bandwidth import Link, Sum, sum_of_times
from support.graphs import chain


def slow_sums(cluster: Cluster, bytes_per_s: float | None, latency_s: float = 0.0) -> Cluster:
    levels = (replace(x, sum_bytes_per_s=bytes_per_s, sum_latency_s=latency_s) for x in cluster.levels)
    return replace(cluster, levels=tuple(levels))


def replicas(cluster: Cluster) -> list[int]:
    return [stage.replicas for stage in make_plan(chain([1.0] * 3, 1.0, 10.0), cluster).stages]


def test_slow_sums_make_the_planner_cut_where_fast_ones_made_it_replicate():
    links = machines(4, 1e3)
    assert replicas(links) == [4]
    assert replicas(slow_sums(links, 1e3)) == [4]
    assert len(replicas(slow_sums(links, 10.0))) == 3
    assert len(replicas(slow_sums(links, None, latency_s=20.0))) == 3


def test_an_update_of_replicas_takes_as_long_as_the_sum_that_was_measured():
    cluster = slow_sums(machines(4, 1e3), 80.0, latency_s=2.0)
    plan = data_parallel_plan(chain([1.0], 1.0, 10.0), cluster, Settings(Schedule.STASH, 4))
    (stage,) = plan.stages
    assert stage.update_s == pytest.approx((1 - 1 / 4) * (2.0 + 4 * 10.0 / 80.0))
    assert plan.bottleneck_s == pytest.approx((stage.compute_s + stage.update_s) / 4)
    assert predict(plan).step_s == pytest.approx(stage.compute_s + stage.update_s)


def test_replicas_under_2bw_sum_once_a_batch_however_many_microbatches_it_has():
    cluster = slow_sums(machines(4, 1e3), 80.0, latency_s=2.0)
    for microbatches in (4, 8, 32):
        settings = Settings(Schedule.TWO_BUFFERED, microbatches)
        plan = data_parallel_plan(chain([1.0], 1.0, 10.0), cluster, settings)
        (stage,) = plan.stages
        assert plan.step_s == pytest.approx(microbatches / 4 * stage.compute_s + stage.update_s)
        updates = [
            op
            for op in operations(plan.schedule, plan.layout(), 64, None, microbatches)[0]
            if isinstance(op, Update)
        ]
        assert len(updates) == 64 / microbatches


def test_two_sizes_give_the_latency_and_the_speed_of_a_sum():
    true = Sum(4, 1e6, 0.002, same_host=True)

    def seconds(size: int) -> float:
        return 0.75 * (true.latency_s + 4 * size / true.bytes_per_s)

    found = sum_of_times(4, True, (1000, seconds(1000)), (10**6, seconds(10**6)))
    assert found.bytes_per_s == pytest.approx(true.bytes_per_s)
    assert found.latency_s == pytest.approx(true.latency_s)


def test_a_sum_that_no_clock_can_take_apart_is_all_bytes():
    found = sum_of_times(2, True, (1000, 0.5), (2000, 0.4))
    assert found.bytes_per_s == pytest.approx(4 * 0.5 * 2000 / 0.4)


def test_measured_levels_go_by_their_slowest_link_and_sum():
    near, far = Link(0, 1, 9e9, 1e-6, True), Link(0, 2, 1e9, 3e-6, False)
    inside, between = Sum(2, 3e9, 1e-4, True), Sum(2, 2e8, 5e-4, False)
    both = measured_machines((2, 2), (near, far), (inside, between))
    rates = [(level.count, level.bytes_per_s, level.sum_bytes_per_s) for level in both.levels]
    assert rates == [(2, 9e9, 3e9), (2, 1e9, 2e8)]
    assert both.latency_s == 3e-6
    (one,) = measured_machines((4,), (near, far), (inside, between)).levels
    assert (one.bytes_per_s, one.sum_bytes_per_s, one.sum_latency_s) == (1e9, 2e8, 5e-4)
    with pytest.raises(PlanError, match="found 2 levels .2x2., but links of 1 were measured"):
        measured_machines((2, 2), (near,), (inside,))


def test_what_a_microbatch_costs_a_worker_besides_its_layers_is_in_the_prediction():
    graph, plain = chain([1.0] * 2, 0.0, 0.0), Settings(Schedule.STASH, 4, straight=True)
    quick = make_plan(graph, machines(2, 1e9), plain)
    slow = make_plan(graph, replace(machines(2, 1e9), overhead_s=0.5), plain)
    assert slow.step_s == pytest.approx(quick.step_s + 4 * 0.5)
    assert slow.bottleneck_s == quick.bottleneck_s
