"""Weights that stages share, in the memory that a plan predicts."""

from dataclasses import replace

import pytest

from plait.graph import GraphError
from plait.planner import PlanError, Schedule, Settings, fastest_plan, machines, make_plan, predict
from plait.schema.plans.graph import Tie
from support.graphs import chain

SHARED = 100.0


def plans(schedule, ties, devices=4, **given):
    graph = replace(chain([1.0] * 8, 10.0, 100.0), ties=ties)
    asked = Settings(schedule=schedule, straight=True, microbatches=8)
    return make_plan(graph, machines(devices, 1e6, **given), asked)


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        # The first stage has the weight anyway. Both sum its gradient in a copy; the last has the weight, a
        # gradient and momentum besides.
        (Schedule.FLUSH, 1, 3 + 1),
        (Schedule.GPIPE, 1, 3 + 1),
        # Two versions, and the sum of the batch before beside the gradient of this one.
        (Schedule.TWO_BUFFERED, 1, 4 + 1),
        # Four in flight in the first stage, one in the last, where three gradients wait.
        (Schedule.STASH, 0, 3 + 3),
    ],
)
def test_a_weight_that_the_last_stage_shares_is_held_there_too(schedule, first, last):
    apart = plans(schedule, ())
    tied = plans(schedule, (Tie(SHARED, ("n0", "n7")),))
    more = [b.memory_bytes - a.memory_bytes for a, b in zip(apart.stages, tied.stages)]
    assert more == pytest.approx([first * SHARED, 0.0, 0.0, last * SHARED])
    replayed = predict(tied).simulation.peak_bytes
    assert [replayed[stage.devices[0]] for stage in tied.stages] == pytest.approx(
        [stage.memory_bytes for stage in tied.stages]
    )


def test_a_weight_that_one_stage_uses_twice_is_no_copy():
    assert plans(Schedule.STASH, (Tie(SHARED, ("n0", "n1")),)).stages == plans(Schedule.STASH, ()).stages


def test_shared_weights_count_where_memory_is_short():
    ties = (Tie(SHARED, ("n0", "n3", "n7")),)
    free = plans(Schedule.STASH, ties)
    needed = max(stage.memory_bytes for stage in free.stages)
    assert plans(Schedule.STASH, ties, memory_bytes=1.2 * needed).stages == free.stages
    # Other cuts fit into less, with the copies that they make; into much less none do.
    limit = 0.9 * needed
    tight = plans(Schedule.STASH, ties, memory_bytes=limit)
    assert max(stage.memory_bytes for stage in tight.stages) <= limit
    assert max(stage.memory_bytes for stage in plans(Schedule.STASH, ()).stages) < needed
    with pytest.raises(PlanError, match="no plan fits"):
        plans(Schedule.STASH, ties, memory_bytes=0.5 * needed)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [(("n0", "n9"), "no node 'n9'"), (("n0",), "two nodes or more"), (("n0", "n0"), "once")],
)
def test_a_tie_between_layers_that_are_not_there_is_refused(nodes, words):
    with pytest.raises(GraphError, match=words):
        replace(chain([1.0] * 8), ties=(Tie(1.0, nodes),))


def test_a_tie_goes_with_its_layers():
    graph = replace(chain([1.0] * 4), ties=(Tie(1.0, ("n0", "n2", "n3")),))
    assert graph.without(["n3"]).ties == (Tie(1.0, ("n0", "n2")),)
    assert graph.without(["n2", "n3"]).ties == ()


@pytest.mark.parametrize(("schedule", "replicas"), [("stash", [3]), ("2bw", [2, 1])])
def test_stash_gets_no_plan_in_which_stages_with_other_replicas_share_a_weight(schedule, replicas):
    graph = replace(chain([0.8, 0.2, 0.2], 1e5, 1e6), ties=(Tie(1e6, ("n0", "n2")),))
    cluster, asked = machines(3, 1e8), Settings(Schedule(schedule), microbatches=12)
    assert [stage.replicas for stage in make_plan(graph, cluster, asked).stages] == [2, 1]
    found = fastest_plan(graph, cluster, asked)
    assert [stage.replicas for stage in found.stages] == replicas
    assert ("The best cut (2-1) has weights" in found.why) == (schedule == "stash")
