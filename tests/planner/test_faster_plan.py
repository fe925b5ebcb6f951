"""Two plans that cut the same batch in different ways: the faster one is taken, and says so."""

from __future__ import annotations

import pytest

from plait.planner import (
    Machines,
    Plan,
    Schedule,
    Settings,
    data_parallel_plan,
    describe_plan,
    faster_plan,
    fastest_plan,
    machines,
)
from support.graphs import chain

SAMPLES = 32


def both_ways(cluster: Machines, parameter_bytes: float, start_s: float) -> tuple[Plan, Plan]:
    """A batch of 32 as 8 microbatches under stash, and as one for each of two workers.

    Each of four layers takes `start_s` whatever it holds, and 0.01 s a sample, forward and as much backward.
    """
    small, large = (
        chain([start_s + 0.01 * samples] * 4, 1.0, parameter_bytes)
        for samples in (SAMPLES // 8, SAMPLES // 2)
    )
    cut = fastest_plan(small, cluster, Settings(Schedule.STASH, 8))
    return cut, data_parallel_plan(large, cluster, Settings(Schedule.FLUSH, 2))


def test_workers_share_a_batch_out_once_where_small_pieces_cost_more():
    cut, whole = both_ways(machines(2, 1e9), 1e3, start_s=0.05)
    chosen = faster_plan(cut, whole)
    assert (chosen.schedule, chosen.microbatches, len(chosen.stages)) == (Schedule.FLUSH, 2, 1)
    assert chosen.step_s == whole.step_s == pytest.approx(8 * (0.05 + 0.16), rel=1e-4)
    assert faster_plan(whole, cut) == chosen


def test_a_pipeline_is_taken_where_sums_are_slow():
    cut, whole = both_ways(machines(2, 1e3), 1e4, start_s=0.0)
    chosen = faster_plan(cut, whole)
    assert (chosen.schedule, chosen.microbatches) == (Schedule.STASH, 8)
    assert [stage.replicas for stage in chosen.stages] == [1, 1]
    assert chosen.step_s == cut.step_s < whole.step_s


def test_the_plan_tells_what_the_other_would_take():
    cut, whole = both_ways(machines(2, 1e9), 1e3, start_s=0.05)
    chosen = faster_plan(cut, whole)
    told = (
        f"The same batch as 8 microbatches under schedule stash (replicas {'-'.join('1' * len(cut.stages))})"
    )
    assert chosen.why.startswith(whole.why)
    assert told in chosen.why
    first, _, rest = describe_plan(chosen).partition("\n")
    assert first == "1 stage on 2 devices, schedule flush, 2 microbatches a step: 1.68 s predicted"
    assert rest == chosen.why
