"""The replay, compared with schedules worked out by hand and with the memory model."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.planner import MemorySettings, Plan, PlanError, Schedule, Settings, machines, make_plan, predict
from plait.planner.schedules.operations import Backward, Forward
from plait.planner.schedules.orders import operations
from plait.planner.schedules.simulator import SimulatedLink, StageCosts, simulate
from support.graphs import chain, graphs
from support.plans import straight_layout

FAST = SimulatedLink(1e30)


def replay(schedule, replicas, count, costs, link=FAST):
    layout = straight_layout(replicas)
    return simulate(layout, operations(schedule, layout, count), costs, lambda a, b: link)


def unit(stages, **fields):
    return [StageCosts(forward_s=1.0, backward_s=2.0, output_bytes=0.0, **fields) for _ in range(stages)]


def under(plan: Plan, schedule: Schedule, microbatches: int) -> Plan:
    """The plan with another schedule."""
    return replace(plan, schedule=schedule, microbatches=microbatches, depths=())


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_synchronous_pipelines_take_what_the_textbook_says(stages, count):
    for schedule in (Schedule.GPIPE, Schedule.FLUSH):
        found = replay(schedule, [1] * stages, count, unit(stages))
        assert found.end_s == pytest.approx((count + stages - 1) * 3)
        assert found.idle_share() == pytest.approx((stages - 1) / (count + stages - 1))
    alone = replay(Schedule.NONE, [1] * stages, count, unit(stages))
    assert alone.end_s == pytest.approx(3 * stages * count)


def test_zero_bubble_is_idle_less_than_one_forward_one_backward():
    flush = replay(Schedule.FLUSH, [1] * 4, 8, unit(4))
    split = replay(Schedule.ZERO_BUBBLE, [1] * 4, 8, unit(4))
    assert split.idle_share() < 0.6 * flush.idle_share()


def test_interleaving_halves_the_bubble():
    from plait.schema.plans.plan import Layout

    layout = Layout(((0,), (1,), (2,), (3,), (0,), (1,), (2,), (3,)))
    costs = [StageCosts(0.5, 1.0, 0.0) for _ in range(8)]
    ops = operations(Schedule.INTERLEAVED, layout, 8)
    found = simulate(layout, ops, costs, lambda a, b: FAST)
    assert found.end_s == pytest.approx(8 * 3 + 3 * 3 / 2)


def test_a_link_adds_latency_and_bytes_over_bandwidth_to_the_way():
    costs = [StageCosts(1.0, 1.0, 100.0), StageCosts(1.0, 1.0, 0.0)]
    found = replay(Schedule.FLUSH, [1, 1], 1, costs, SimulatedLink(50.0, 0.25))
    # Forward, the way there, forward and backward behind, the way back, backward.
    assert found.end_s == pytest.approx(1 + 2.25 + 2 + 2.25 + 1)


def test_messages_of_one_channel_queue_up():
    costs = [StageCosts(1.0, 0.0, 100.0), StageCosts(0.0, 0.0, 0.0)]
    found = replay(Schedule.GPIPE, [1, 1], 3, costs, SimulatedLink(10.0))
    starts = [s.start_s for s in found.ops if s.worker == 1 and isinstance(s.op, Forward)]
    assert starts == pytest.approx([11, 21, 31])


def test_a_slow_replica_holds_up_the_update():
    layout = straight_layout([2])
    costs = [StageCosts(1.0, 1.0, 0.0, update_s=0.5)]
    ops = operations(Schedule.FLUSH, layout, 2)
    found = simulate(layout, ops, costs, lambda a, b: FAST, lambda worker: (1.0, 0.25)[worker])
    assert found.end_s == pytest.approx(8.5)


def test_a_list_that_cannot_run_is_reported_with_who_waits_for_what():
    layout = straight_layout([1, 1])
    lists = {0: (Backward(0, 0), Forward(0, 0)), 1: (Forward(1, 0), Backward(1, 0))}
    with pytest.raises(PlanError, match="every worker waits"):
        simulate(layout, lists, unit(2), lambda a, b: FAST)


@given(
    graphs(layers=6),
    st.integers(1, 5),
    st.sampled_from([kind for kind in Schedule if kind is not Schedule.INTERLEAVED]),
    st.booleans(),
    st.integers(1, 24),
)
def test_the_memory_model_says_what_the_replay_needs(graph, devices, schedule, recompute, count):
    memory = MemorySettings(optimizer_copies=2, recompute=recompute)
    wanted = Settings(schedule=schedule, microbatches=count, memory=memory)
    plan = make_plan(graph, machines(devices, 5.0), wanted)
    found = predict(plan)
    for stage in plan.stages:
        for device in stage.devices:
            used = found.simulation.peak_bytes[device]
            assert used <= stage.memory_bytes * (1 + 1e-9)
    if schedule in (Schedule.FLUSH, Schedule.GPIPE, Schedule.NONE):
        # The first replica of a stage has a microbatch in every round, so it fills what was promised.
        for stage in plan.stages:
            assert found.simulation.peak_bytes[stage.devices[0]] == pytest.approx(stage.memory_bytes)


def test_every_schedule_of_a_plan_can_be_compared():
    plan = make_plan(chain([1.0] * 8, 1.0, 1.0), machines(4, 1000.0), Settings(schedule=Schedule.FLUSH))
    found = {
        kind: predict(replace(plan, schedule=kind, microbatches=16, depths=()))
        for kind in set(Schedule) - {Schedule.INTERLEAVED}
    }
    assert found[Schedule.STASH].step_s <= found[Schedule.FLUSH].step_s <= found[Schedule.NONE].step_s
    assert found[Schedule.GPIPE].peak_bytes > found[Schedule.FLUSH].peak_bytes


def test_stages_dealt_in_turn_run_under_every_schedule():
    wanted = Settings(schedule=Schedule.INTERLEAVED, microbatches=8)
    plan = make_plan(chain([1.0] * 8, 1.0, 1.0), machines(2, 1000.0), wanted)
    found = {kind: predict(under(plan, kind, 8)) for kind in Schedule}
    assert found[Schedule.STASH].step_s < found[Schedule.INTERLEAVED].step_s < found[Schedule.NONE].step_s
    assert found[Schedule.STASH].idle_share < 0.05


def test_stashing_without_messages_runs_at_the_bottleneck():
    plan = make_plan(chain([1.0, 1.0, 1.0, 1.0], 0.0, 0.0), machines(4, 1.0), Settings(straight=True))
    assert plan.bottleneck_s == pytest.approx(2.0)
    assert plan.step_s / plan.microbatches == pytest.approx(2.0)
    assert plan.idle_share == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("schedule", [Schedule.STASH, Schedule.FLUSH])
def test_more_microbatches_in_flight_hide_messages_where_memory_allows(schedule):
    graph = chain([1.0] * 4, 20.0, 1.0)
    # A message takes two seconds, as long as a stage: the schedule's own depth leaves devices waiting.
    plain = Settings(schedule=schedule, straight=True, microbatches=32)
    waiting = make_plan(graph, machines(4, 20.0), plain)
    hidden = make_plan(graph, machines(4, 20.0), replace(plain, hide_messages=True))
    assert waiting.idle_share > 0.3
    assert hidden.idle_share < 0.5 * waiting.idle_share
    assert hidden.stages[0].in_flight > waiting.stages[0].in_flight
    assert hidden.stages[0].memory_bytes > waiting.stages[0].memory_bytes
    limit = 1.01 * max(stage.memory_bytes for stage in waiting.stages)
    small = make_plan(graph, machines(4, 20.0, memory_bytes=limit), replace(plain, hide_messages=True))
    assert small.depths == ()
