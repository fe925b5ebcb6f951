"""Plans as values: what they say, how they are saved, and what is refused."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from brute_force import down_sets
from hypothesis import given
from hypothesis import strategies as st

from plait.graph import Graph, Node, pipedream
from plait.graph.intervals import cover_ideals
from plait.planner import (
    Cluster,
    Device,
    Level,
    MemorySettings,
    PlanError,
    Schedule,
    Settings,
    data_parallel_plan,
    draw_plan,
    fastest_plan,
    load_plan,
    machines,
    make_plan,
    model_parallel_plan,
    render_plan,
    save_plan,
    summary,
)
from plait.planner.partition.bounds import lower_bound
from plait.planner.partition.partitioner import planning_graph
from support.graphs import PROFILES, chain, graphs


def vgg() -> Graph:
    return pipedream.read(PROFILES / "vgg16.txt").graph()


def test_a_plan_comes_back_from_its_file(tmp_path):
    plan = make_plan(vgg(), machines((2, 2), (1e10, 1e9), memory_bytes=40e9))
    save_plan(plan, tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json") == plan


def test_the_summary_holds_the_contract_and_is_json():
    plan = make_plan(vgg(), machines(4, 1e9))
    found = json.loads(json.dumps(summary(plan)))
    assert found["bottleneck_s"] == pytest.approx(0.205521, abs=5e-7)
    assert found["exact"] is True
    assert found["lower_bound_s"] == found["bottleneck_s"]
    assert {"layers", "replicas", "compute_s", "memory_bytes"} <= set(found["stages"][0])
    assert set(found["speedup_over"]) == {"single", "data_parallel", "model_parallel"}
    assert found["solve_s"] > 0


def test_every_layer_but_the_input_is_in_exactly_one_stage():
    plan = make_plan(vgg(), machines(4, 1e9))
    layers = [layer for stage in plan.stages for layer in stage.layers]
    assert sorted(layers) == sorted(node.id for node in vgg().nodes if node.description != "Input")


def test_the_gains_are_over_what_the_plain_plans_take():
    cluster = machines(4, 1e9)
    plan = make_plan(vgg(), cluster)
    graph = planning_graph(vgg())
    assert plan.speedup_over.single == pytest.approx(graph.compute_s() / plan.bottleneck_s)
    data_parallel = data_parallel_plan(vgg(), cluster)
    sync = 4 * 3 * graph.parameter_bytes() / (1e9 * 4)
    assert data_parallel.bottleneck_s == pytest.approx((graph.compute_s() + sync) / 4)
    assert plan.speedup_over.data_parallel == pytest.approx(data_parallel.bottleneck_s / plan.bottleneck_s)
    assert data_parallel.step_s / data_parallel.microbatches == pytest.approx(data_parallel.bottleneck_s)
    model_parallel = model_parallel_plan(vgg(), cluster)
    assert all(stage.replicas == 1 for stage in model_parallel.stages)
    assert plan.speedup_over.model_parallel == pytest.approx(
        model_parallel.bottleneck_s / plan.bottleneck_s, rel=0.02
    )
    assert model_parallel.step_s / model_parallel.microbatches == pytest.approx(
        model_parallel.bottleneck_s, rel=1e-6
    )


def test_the_table_shows_stages_gains_and_reasons():
    text = render_plan(make_plan(vgg(), machines(4, 1e9)))
    assert "2 stages on 4 devices" in text
    assert "3.27x one device, 2.84x data parallelism" in text
    header = next(line for line in text.splitlines() if line.startswith("stage"))
    assert header.split() == ["stage", "layers", "replicas", "seconds", "memory", "traffic", "devices"]
    assert "Data parallelism would take" in text
    assert "Model parallelism would take" in text


def test_devices_that_would_not_help_stay_unused_and_the_plan_says_so():
    plan = make_plan(chain([1.0], 0.0, 1e12), machines(8, 1.0))
    assert plan.devices_used == 1
    assert "7 of 8 devices stay unused" in plan.why


def test_the_picture_is_a_png(tmp_path):
    plan = make_plan(chain([1.0] * 6, 1.0, 1.0), machines(3, 100.0), Settings(schedule=Schedule.FLUSH))
    draw_plan(plan, tmp_path / "out" / "t.png")
    assert (tmp_path / "out" / "t.png").read_bytes().startswith(b"\x89PNG")


def test_stashing_needs_more_memory_than_flushing_and_recomputing_less():
    graph = chain([1.0] * 8, 10.0, 100.0)
    wanted = {"straight": True, "microbatches": 8}
    stash = make_plan(graph, machines(4, 1e6), Settings(schedule=Schedule.STASH, **wanted))
    flush = make_plan(graph, machines(4, 1e6), Settings(schedule=Schedule.FLUSH, **wanted))
    # First of four stages, two layers: four versions or one, a gradient, momentum; four times 20 bytes of
    # activations and a message of 10; two gradients of 10.
    assert stash.stages[0].memory_bytes == pytest.approx((4 + 2) * 200 + 4 * (20 + 10) + 2 * 10)
    assert flush.stages[0].memory_bytes == pytest.approx((1 + 2) * 200 + 4 * (20 + 10) + 2 * 10)
    # The last: its input, one more that waits, and two gradients.
    assert flush.stages[-1].memory_bytes == pytest.approx((1 + 2) * 200 + 20 + 10 + 10 + 2 * 10)
    memory = MemorySettings(recompute=True)
    again = make_plan(graph, machines(4, 1e6), Settings(schedule=Schedule.FLUSH, memory=memory, **wanted))
    assert again.stages[1].memory_bytes == pytest.approx((1 + 2) * 200 + 3 * (10 + 10) + 5 * 10 + 20)
    assert again.bottleneck_s == pytest.approx(1.5 * flush.bottleneck_s)


@pytest.mark.parametrize("cluster", [machines(4, 1e9), machines((2, 2), (10e9, 1e9))], ids=["4", "2x2"])
def test_a_memory_limit_is_kept_by_every_stage(cluster):
    free = make_plan(vgg(), cluster)
    needed = max(stage.memory_bytes for stage in free.stages)
    tight = make_plan(vgg(), machines(_counts(cluster), _rates(cluster), memory_bytes=0.6 * needed))
    assert max(stage.memory_bytes for stage in tight.stages) <= 0.6 * needed
    assert tight.bottleneck_s >= free.bottleneck_s


def _counts(cluster):
    return tuple(level.count for level in cluster.levels)


def _rates(cluster):
    return tuple(level.bytes_per_s for level in cluster.levels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: machines(0, 1e9), "found 0 devices, expected at least 1"),
        (lambda: machines(4, -1.0), "found a bandwidth of -1 bytes/s, expected more than 0"),
        (lambda: machines(4, 1e-320), "found a bandwidth of .* bytes/s, expected more than 0"),
        (lambda: machines(1, 1e9, devices=(Device(speed=1e-320),)), "device 0: found speed"),
        (lambda: machines((4, 4), (1e9,)), "found 2 levels of devices .4x4. and 1 bandwidths"),
        (lambda: machines(4, 1e9, memory_bytes=0), "found a memory of 0 bytes"),
        (lambda: machines(2, 1e9, devices=(Device(),)), "found 1 devices described for 2 devices"),
        (lambda: machines(1, 1e9, devices=(Device(speed=0),)), "device 0: found speed 0"),
        (lambda: machines("4", 1e9), r"found '4' devices .* expected numbers: machines\(4, 1e9\)"),
        (lambda: machines(4.0, 1e9), r"found 4.0 devices"),
        (lambda: machines(10**8, 1e9), "found 100000000 devices, expected 16,384 at most"),
        (lambda: Cluster((Level(2, 1e9, math.inf),)), "found sums at inf bytes/s"),
        (lambda: Cluster((Level(2, 1e9, 1e9, math.nan),)), "with a latency of nan s"),
        (
            lambda: Cluster((Level(2, 1e9),), overhead_s=-1.0),
            "found an overhead of -1 s, expected 0 or more",
        ),
        (lambda: make_plan(vgg(), 4), r"found 4 as machines, expected plait.machines\(4, 1e9\)"),
        (lambda: make_plan("x.json", machines(4, 1e9)), "found 'x.json', expected a profile or its graph"),
        (lambda: make_plan(vgg(), machines(4, 1e9), Settings(microbatches=10**9)), "expected 1 to 65,536"),
        (lambda: make_plan(Graph((), ()), machines(4, 1e9)), "the graph is empty"),
        (lambda: make_plan(chain([0.0]), machines(4, 1e9)), "none of the 1 operations takes any time"),
        (lambda: make_plan(vgg(), machines(4, 1e9), Settings(microbatches=0)), "found 0 microbatches"),
        (
            lambda: make_plan(vgg(), machines(4, 1e9), Settings(pipelines=5)),
            "found 5 pipelines .* expected 1 to 4",
        ),
        (
            lambda: make_plan(chain([1.0] * 3), machines(4, 1e9), Settings(schedule=Schedule.INTERLEAVED)),
            "needs 8 stages .* model has 3 layers; use at most 1 devices",
        ),
        (
            lambda: make_plan(vgg(), machines(4, 1e9), Settings(pipelines=3, microbatches=2)),
            "found 2 microbatches for 3 pipelines",
        ),
        (
            lambda: make_plan(
                vgg(), machines(2, 1e9, devices=(Device(), Device(0.5))), Settings(pipelines=2)
            ),
            "2 pipelines side by side need as many devices alike, but no more than 1 of the 2 are",
        ),
        (
            lambda: make_plan(vgg(), machines(4, 1e9, memory_bytes=1e9)),
            "every device has 1 GB, and 4 devices under schedule stash need about .* GB each",
        ),
    ],
)
def test_bad_input_is_refused_with_what_would_have_to_change(make, message):
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.update(stages=[]), "found no stages"),
        (lambda plan: plan.update(microbatches=0), "microbatches: found 0, expected 1 to 65536"),
        (lambda plan: plan.update(microbatches=-2), "microbatches: found -2"),
        (lambda plan: plan.update(microbatches=2**40), "microbatches: found 1099511627776"),
        (lambda plan: plan.update(pipelines=0), "pipelines: found 0, expected 1"),
        (lambda plan: plan.update(depths=[1]), "depths: found 1, expected one for each of"),
        (lambda plan: plan.update(depths=[0] * len(plan["stages"])), "depths: found 0, expected 1 to"),
        (lambda plan: plan.update(step_s=-1.0), "step_s: found -1, expected a number from 0 to"),
        (lambda plan: plan.update(bottleneck_s=math.nan), "bottleneck_s: found nan"),
        (lambda plan: plan["speedup_over"].update(single=math.inf), "speedup_over.single: found inf"),
        (lambda plan: plan["machines"].update(latency_s=-1.0), "found a latency of -1 s"),
        (lambda plan: plan["stages"][0].update(layers=[]), r"stages\[0\].layers: found none"),
        (
            lambda plan: plan["stages"][0].update(devices=[-1]),
            r"stages\[0\].devices: found -1, expected 0 to 3",
        ),
        (
            lambda plan: plan["stages"][0].update(devices=[4]),
            r"stages\[0\].devices: found 4, expected 0 to 3",
        ),
        (lambda plan: plan["stages"][0].update(devices=[]), r"stages\[0\]"),
        (lambda plan: plan["stages"][0].update(devices=[1, 1]), "expected each device once"),
        (lambda plan: plan["stages"][0].update(replicas=-1), r"stages\[0\].replicas: found -1, expected"),
        (
            lambda plan: plan["stages"][0].update(in_flight=0),
            r"stages\[0\].in_flight: found 0, expected 1 to",
        ),
        (lambda plan: plan["stages"][0].update(forward_s=-1.0), r"stages\[0\].forward_s: found -1"),
        (
            lambda plan: plan["stages"][0].update(memory_bytes=1e308),
            r"stages\[0\].memory_bytes: found 1e\+308",
        ),
        (lambda plan: plan["stages"][0]["tied"].update(shared_bytes=-1.0), r"tied.shared_bytes: found -1"),
        (lambda plan: plan["stages"].append(plan["stages"][0]), "more than once, expected each layer in one"),
    ],
)
def test_a_plan_file_that_nobody_could_run_is_refused(tmp_path, change, message):
    path = tmp_path / "plan.json"
    save_plan(make_plan(vgg(), machines(4, 1e9)), path)
    plan = json.loads(path.read_text())
    change(plan)
    path.write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_what_agreeing_takes_is_part_of_the_pace_that_is_reported():
    plain = chain([1.0] * 4, parameter_bytes=0.25)
    slow_updates = replace(plain, nodes=tuple(replace(node, update_s=2.0) for node in plain.nodes))
    for schedule in (Schedule.FLUSH, Schedule.STASH, Schedule.TWO_BUFFERED):
        plan = data_parallel_plan(slow_updates, machines(2, 1.0), Settings(schedule))
        pace, _, part = plan.why.partition(" a microbatch, ")
        seconds = float(pace.removeprefix("Stage 0 sets the pace at ").removesuffix(" s"))
        assert 0 < float(part.partition(" s of it to agree on gradients")[0]) < seconds


def test_only_what_was_asked_for_is_said_to_stand_in_the_way():
    graph = chain([1.0] * 4, parameter_bytes=1e9)
    nothing = data_parallel_plan(graph, machines(2, 1e8), Settings(Schedule.FLUSH))
    assert nothing.speedup_over.single < 1
    assert "that was asked for" not in nothing.why
    limited = data_parallel_plan(graph, machines(2, 1e8, memory_bytes=1e12), Settings(Schedule.FLUSH))
    assert "What would be faster does not fit the memory that was asked for." in limited.why


def test_a_profile_can_be_planned_as_it_is():
    class Measured:
        def loaded_graph(self) -> Graph:
            return vgg()

    assert make_plan(Measured(), machines(4, 1e9)).stages == make_plan(vgg(), machines(4, 1e9)).stages
    assert fastest_plan(Measured(), machines(2, 1e9)).stages == fastest_plan(vgg(), machines(2, 1e9)).stages


def test_the_memory_that_is_asked_for_is_enough_and_little_less_is_not():
    with pytest.raises(PlanError) as refused:
        make_plan(chain([1.0] * 8, 1e6, 1e8), machines(2, 1e9, memory_bytes=1e8))
    asked = float(str(refused.value).split("need about ")[1].split(" GB")[0]) * 1e9
    make_plan(chain([1.0] * 8, 1e6, 1e8), machines(2, 1e9, memory_bytes=1.02 * asked))
    with pytest.raises(PlanError):
        make_plan(chain([1.0] * 8, 1e6, 1e8), machines(2, 1e9, memory_bytes=0.95 * asked))


def test_interleaved_workers_hold_several_stages():
    plan = make_plan(chain([1.0] * 8, 1.0, 1.0), machines(2, 1e6), Settings(schedule=Schedule.INTERLEAVED))
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (0,), (1,)]
    assert plan.bottleneck_s == pytest.approx(8.0)
    assert 0 < plan.idle_share < 0.3


def test_an_interleaved_plan_that_does_not_fit_is_refused():
    with pytest.raises(PlanError, match="device 0 would need .* but has"):
        make_plan(
            chain([1.0] * 8, 1e6, 1e6),
            machines(2, 1e6, memory_bytes=8e6),
            Settings(schedule=Schedule.INTERLEAVED),
        )


@given(
    graphs(layers=4), st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=1, max_size=3), st.integers(1, 20)
)
def test_no_way_to_hand_out_unlike_devices_beats_the_planner(graph, speeds, rate):
    cluster = machines(len(speeds), float(rate), devices=tuple(Device(speed) for speed in speeds))
    plan = make_plan(graph, cluster)
    best = best_on_unlike_devices(graph, speeds, rate)
    assert plan.bottleneck_s == pytest.approx(best, rel=1e-8)
    assert plan.exact


def best_on_unlike_devices(graph: Graph, speeds: list[float], rate: float) -> float:
    ideals = down_sets(graph)
    everything = frozenset(graph.order)

    def stage(start, end, devices, first):
        m = len(devices)
        sync = 4 * (m - 1) * graph.parameter_bytes(end - start) / (rate * m)
        worst = (graph.compute_s(end - start) / min(speeds[d] for d in devices) + sync) / m
        if not first:
            worst = max(worst, 2 * graph.crossing_bytes(start) / (rate * m))
            if end != everything:
                worst = max(worst, 2 * graph.crossing_bytes(end) / (rate * m))
        return worst

    def best(start, free, first):
        if start == everything:
            return 0.0
        found = math.inf
        for end in ideals:
            if start < end:
                for size in range(1, len(free) + 1):
                    for devices in itertools.combinations(sorted(free), size):
                        here = stage(start, end, devices, first)
                        if here < found:
                            found = min(found, max(here, best(end, free - set(devices), False)))
        return found

    return best(frozenset(), frozenset(range(len(speeds))), True)


def test_small_devices_get_stages_that_fit_them():
    graph = chain([1.0] * 6, 1.0, 100.0)
    devices = (Device(1.0, 1e5), Device(1.0, 1e5), Device(1.0, 700.0))
    plan = make_plan(graph, machines(3, 50.0, devices=devices))
    for stage in plan.stages:
        for device in stage.devices:
            limit = devices[device].memory_bytes
            assert limit is not None
            assert stage.memory_bytes <= limit
    with pytest.raises(PlanError, match="no plan fits"):
        make_plan(graph, machines(3, 50.0, devices=(Device(1.0, 10.0), Device(0.5, 20.0), Device(1.0, 10.0))))


def test_many_unlike_devices_are_planned_with_a_bound():
    devices = tuple(Device(1.0 - 0.01 * i) for i in range(12))
    plan = make_plan(chain([1.0] * 10, 1.0, 1.0), machines(12, 1e4, devices=devices))
    assert not plan.exact
    assert plan.lower_bound_s == pytest.approx(20.0 / sum(d.speed for d in devices))
    assert plan.lower_bound_s <= plan.bottleneck_s


@given(graphs(layers=7), st.integers(1, 4), st.integers(1, 30), st.integers(1, 6), st.integers(0, 3))
def test_the_lower_bound_is_never_above_the_best_plan(graph, count, rate, intervals, latency):
    level = Level(count, float(rate), 31.0 - rate, float(latency))
    best = make_plan(graph, Cluster((level,))).bottleneck_s
    bound = lower_bound(cover_ideals(graph, intervals), (level,), 1.5 * best)
    assert bound <= best * (1 + 1e-6)


@given(graphs(layers=5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 30))
def test_the_lower_bound_of_two_levels_is_never_above_the_best_plan(graph, inner, outer, rate):
    cluster = machines((inner, outer), (2.0 * rate, float(rate)))
    best = make_plan(graph, cluster).bottleneck_s
    bound = lower_bound(cover_ideals(graph, 4), cluster.levels, 1.5 * best)
    assert bound <= best * (1 + 1e-6)


def test_more_microbatches_are_chosen_while_they_pay():
    graph = chain([1.0] * 4, 0.0, 0.0)
    plan = make_plan(graph, machines(4, 1.0), Settings(schedule=Schedule.FLUSH, straight=True))
    # Three stages' worth of bubble: 3/(M + 3) is under 5% of the best tried from 32 on.
    assert plan.microbatches == 32
    assert plan.idle_share == pytest.approx(3 / 35)


def test_inputs_and_unused_results_are_left_to_the_loader():
    nodes = (
        Node("i", "Input0", 9.0, 0.0, 1.0, 0.0),
        Node("a", "Linear", 1.0, 1.0, 1.0, 1.0),
        Node("g", "__getitem__(1)", 0.0, 0.0, 1.0, 0.0),
    )
    edge = type(vgg().edges[0])
    graph = Graph(nodes, (edge("i", "a", 1.0), edge("a", "g", 1.0)))
    assert [node.id for node in planning_graph(graph).nodes] == ["a"]


def test_a_pipeline_that_would_stand_idle_gives_way_to_replicas_and_the_plan_says_why():
    # Agreeing costs a little, so cutting has the lower bottleneck; but two microbatches leave it half full.
    graph = chain([0.1] * 4, parameter_bytes=1e6)
    cluster = machines(2, 1e9)
    asked = Settings(Schedule.FLUSH, microbatches=2)
    cut, chosen = make_plan(graph, cluster, asked), fastest_plan(graph, cluster, asked)
    assert [len(plan.stages) for plan in (cut, chosen)] == [2, 1]
    assert cut.bottleneck_s < chosen.bottleneck_s
    assert chosen.step_s < 0.8 * cut.step_s
    assert "The best cut (1-1) has a bottleneck of" in chosen.why
    assert chosen.stages == data_parallel_plan(graph, cluster, asked).stages


def test_replicas_that_do_not_fit_leave_the_best_cut():
    graph = chain([0.1] * 4, parameter_bytes=1e6)
    asked = Settings(Schedule.FLUSH, microbatches=2)
    needed = max(stage.memory_bytes for stage in make_plan(graph, machines(2, 1e9), asked).stages)
    cluster = machines(2, 1e9, memory_bytes=1.1 * needed)
    assert fastest_plan(graph, cluster, asked).stages == make_plan(graph, cluster, asked).stages
