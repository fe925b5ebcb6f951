"""A plan and a simpler one that cut the same batch in different ways: one is taken, and says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.graph import Graph, pipedream
from plait.planner import (
    Cluster,
    Plan,
    Schedule,
    Settings,
    data_parallel_plan,
    describe_plan,
    faster_plan,
    fastest_plan,
    machines,
    make_plan,
    summary,
)
from support.graphs import PROFILES, chain

SAMPLES = 32


def both_ways(cluster: Cluster, parameter_bytes: float, start_s: float) -> tuple[Plan, Plan]:
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


@pytest.mark.parametrize(("gain", "is_taken"), [(1.02, False), (1.09, False), (1.12, True)])
def test_a_pipeline_must_be_a_tenth_faster_than_the_simple_plan(gain: float, is_taken: bool):
    cut, whole = both_ways(machines(2, 1e3), 1e4, start_s=0.0)
    cut = replace(cut, step_s=whole.step_s / gain)
    chosen = faster_plan(cut, whole)
    assert (chosen.stages == cut.stages) is is_taken
    assert ("less than a tenth is no reason" in chosen.why) is not is_taken


def test_what_the_simple_plan_took_counts_where_that_is_less_than_was_predicted():
    cut, whole = both_ways(machines(2, 1e3), 1e4, start_s=0.0)
    assert faster_plan(cut, whole, measured_s=2 * whole.step_s).stages == cut.stages
    chosen = faster_plan(cut, whole, measured_s=cut.step_s)
    assert chosen.stages == whole.stages
    assert "Measured, a step of data parallelism took" in chosen.why


def test_a_pipeline_is_taken_where_sums_are_slow():
    cut, whole = both_ways(machines(2, 1e3), 1e4, start_s=0.0)
    chosen = faster_plan(cut, whole)
    assert (chosen.schedule, chosen.microbatches) == (Schedule.STASH, 8)
    assert [stage.replicas for stage in chosen.stages] == [1, 1]
    assert chosen.step_s == cut.step_s < whole.step_s


def test_the_plan_says_what_the_other_would_take():
    cut, whole = both_ways(machines(2, 1e9), 1e3, start_s=0.05)
    chosen = faster_plan(cut, whole)
    expected = (
        f"The same batch as 8 microbatches under schedule stash (replicas {'-'.join('1' * len(cut.stages))})"
    )
    assert chosen.why.startswith(whole.why)
    assert expected in chosen.why
    first, _, rest = describe_plan(chosen).partition("\n")
    assert first == "1 stage on 2 devices, schedule flush, 2 microbatches a step: 1.68 s predicted"
    assert rest == chosen.why


def slow_messages() -> tuple[Graph, Cluster]:
    """Four layers with messages nearly as long: the bottleneck counts them, but not who waits for them."""
    return chain([1.0] * 4, 0.4e9, 0.1e9), machines(4, 1e9)


def test_the_time_of_the_whole_search_is_reported_whichever_plan_was_taken():
    # A cut into stages has the lower bottleneck, but replicas of the whole model take less time for a step.
    graph, cluster = pipedream.read(PROFILES / "squeezenet1_0.txt").graph(), machines(4, 1e9)
    best, taken = make_plan(graph, cluster), fastest_plan(graph, cluster)
    assert [stage.replicas for stage in taken.stages] != [stage.replicas for stage in best.stages]
    found = summary(taken)
    assert found["lower_bound_s"] == best.lower_bound_s
    assert 0 < found["lower_bound_s"] <= found["bottleneck_s"]
    assert found["best_partition"] == {
        "bottleneck_s": best.bottleneck_s,
        "replicas": [stage.replicas for stage in best.stages],
    }
    assert found["solve_s"] > 0
    assert found["exact"] is False
    assert "A step of the best cut (3-1) is predicted to take" in found["why"]
    assert "--hide-messages" in found["why"]


def test_a_step_longer_than_the_bottleneck_is_explained_and_hiding_messages_helps():
    graph, cluster = slow_messages()
    settings = Settings(straight=True)
    plan = fastest_plan(graph, cluster, settings)
    assert plan.step_s / plan.microbatches > 1.1 * plan.bottleneck_s
    assert "longer than its bottleneck of" in plan.why
    assert "stages wait for messages from each other" in plan.why
    assert "--hide-messages keeps more microbatches in flight" in plan.why
    hidden = fastest_plan(graph, cluster, replace(settings, hide_messages=True))
    assert hidden.step_s < plan.step_s
    assert "--hide-messages" not in hidden.why


def test_filling_and_draining_is_named_where_it_makes_the_step_longer():
    plan = fastest_plan(
        chain([1.0] * 4, 1.0, 0.1e9), machines(4, 1e9), Settings(Schedule.FLUSH, 4, straight=True)
    )
    assert "the pipeline fills and drains in every step" in plan.why
    assert "--hide-messages" not in plan.why
