"""What every schedule promises, for up to 16 stages and 64 microbatches, any replicas."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.planner import PlanError, Schedule
from plait.planner.cluster import machines
from plait.planner.predict import depths_that_hide_messages
from plait.planner.schedules.in_flight import in_flight
from plait.planner.schedules.operations import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Update,
)
from plait.planner.schedules.orders import batch_of_two_buffers, operations
from plait.planner.schedules.several_stages import interleaved_depth
from plait.planner.schedules.simulator import SimulatedLink, StageCosts, simulate
from plait.schema.plans.plan import Layout
from support.plans import straight_layout

replicated = st.lists(st.integers(1, 4), min_size=1, max_size=16).map(straight_layout)
microbatches = st.integers(1, 64)
PLAIN = [kind for kind in Schedule if kind is not Schedule.INTERLEAVED]


def peer_before(layout: Layout, op: Forward) -> int | None:
    """Whom a forward receives from; None where the loader feeds the stage."""
    return layout.worker(op.stage - 1, op.microbatch) if op.stage > 0 else None


def peer_behind(layout: Layout, op: Backward | BackwardInput) -> int | None:
    """Whom a backward receives from; None where the loss does."""
    last = len(layout.stages) - 1
    return layout.worker(op.stage + 1, op.microbatch) if op.stage < last else None


def messages_per_channel(schedule: Schedule, layout: Layout, depths: Mapping[int, int] | None = None) -> int:
    """How many messages each channel (one direction between two stages' workers) must hold.

    With so much room a blocking send never ends in a deadlock: one message for most schedules, a group
    where workers interleave stages, and one more for each microbatch by which a stage is made deeper. Where
    a worker holds several stages in another way, it is what the sender keeps in flight (`in_flight`).
    """
    if schedule is Schedule.INTERLEAVED:
        return len(layout.workers)
    many = layout.devices_from(0) + len(layout.stages)
    extra = [depth - in_flight(schedule, layout, stage, many) for stage, depth in (depths or {}).items()]
    return 1 + max([0, *extra])


@st.composite
def folded(draw):
    """Workers that hold several stages each, dealt in turn."""
    workers = draw(st.integers(1, 8))
    stages = draw(st.integers(workers, 16))
    return Layout(tuple((stage % workers,) for stage in range(stages)))


@st.composite
def shared(draw):
    """Stages with one or two workers each, of few: most hold several stages."""
    workers = range(draw(st.integers(2, 4)))
    pair = st.lists(st.sampled_from(workers), min_size=1, max_size=2, unique=True).map(tuple)
    return Layout(tuple(draw(st.lists(pair, min_size=2, max_size=8))))


@given(st.sampled_from(PLAIN), shared(), st.integers(1, 24))
def test_workers_that_hold_several_stages_never_wait_for_ever_and_each_stage_keeps_its_order(
    kind, layout, count
):
    """With the order goes what it promises: versions, microbatches in flight, updates."""
    lists = operations(kind, layout, count)
    simulate(
        layout, lists, [StageCosts(1.0, 2.0, 1.0)] * len(layout.stages), lambda a, b: SimulatedLink(1.0, 3.0)
    )
    # As if every replica of a stage were a worker of its own.
    apart = straight_layout([len(workers) for workers in layout.stages])
    alone = operations(kind, apart, count)
    for stage, workers in enumerate(layout.stages):
        for replica, worker in enumerate(workers):
            ours = [op for op in lists[worker] if op.stage == stage]
            theirs = alone[apart.stages[stage][replica]]
            if kind is Schedule.ZERO_BUBBLE:
                # Where weight gradients fill gaps depends on what else the worker has to do.
                ours = [op for op in ours if not isinstance(op, BackwardWeight)]
                theirs = [op for op in theirs if not isinstance(op, BackwardWeight)]
            assert ours == list(theirs)


@st.composite
def cases(draw):
    if draw(st.integers(0, 3)) == 0:
        return Schedule.INTERLEAVED, draw(folded()), draw(microbatches)
    layouts = shared() if draw(st.integers(0, 2)) == 0 else replicated
    return draw(st.sampled_from(PLAIN)), draw(layouts), draw(microbatches)


def held_over_time(ops, stage):
    """Microbatches in flight in `stage` after each operation, with the versions of the weights in use."""
    held, current = {}, 0
    for op in ops:
        if op.stage != stage:
            continue
        if isinstance(op, Forward):
            held[op.microbatch] = op.version
        yield len(held), len({current, *held.values()})
        if isinstance(op, (Backward, BackwardWeight)):
            del held[op.microbatch]
        elif isinstance(op, Update):
            current = op.version


@given(cases())
def test_every_microbatch_goes_forward_once_and_backward_once_in_every_stage(case):
    schedule, layout, count = case
    lists = operations(schedule, layout, count)
    done = Counter(
        (type(op), op.stage, op.microbatch)
        for ops in lists.values()
        for op in ops
        if not isinstance(op, Update)
    )
    assert set(done.values()) == {1}
    halves = [BackwardInput, BackwardWeight] if schedule is Schedule.ZERO_BUBBLE else [Backward]
    wanted = itertools.product([Forward, *halves], range(len(layout.stages)), range(count))
    assert set(done) == set(wanted)


@given(cases())
def test_each_worker_gets_its_own_microbatches_in_an_order_that_can_be(case):
    schedule, layout, count = case
    for worker, ops in operations(schedule, layout, count).items():
        seen = {}
        for op in ops:
            if isinstance(op, Update):
                continue
            assert layout.worker(op.stage, op.microbatch) == worker
            seen.setdefault((op.stage, op.microbatch), []).append(op)
        for done in seen.values():
            kinds = [type(op) for op in done]
            assert kinds in ([Forward, Backward], [Forward, BackwardInput, BackwardWeight])
            assert len({op.version for op in done}) == 1


@given(cases())
def test_both_ends_of_every_channel_agree_on_what_comes_in_which_order(case):
    schedule, layout, count = case
    lists = operations(schedule, layout, count)
    sent, received = {}, {}
    last = len(layout.stages) - 1
    for worker, ops in lists.items():
        for op in ops:
            if isinstance(op, Forward):
                if op.stage < last:
                    receiver = layout.worker(op.stage + 1, op.microbatch)
                    sent.setdefault((worker, receiver, op.stage + 1, "f"), []).append(op.microbatch)
                if (sender := peer_before(layout, op)) is not None:
                    received.setdefault((sender, worker, op.stage, "f"), []).append(op.microbatch)
            elif isinstance(op, (Backward, BackwardInput)):
                if op.stage > 0:
                    receiver = layout.worker(op.stage - 1, op.microbatch)
                    sent.setdefault((worker, receiver, op.stage - 1, "b"), []).append(op.microbatch)
                if (sender := peer_behind(layout, op)) is not None:
                    received.setdefault((sender, worker, op.stage, "b"), []).append(op.microbatch)
    assert sent == received


def runs_on_channels_of(capacity, layout, lists):
    """Play the lists with blocking sends into channels that hold `capacity` messages each."""
    last = len(layout.stages) - 1
    channels, waiting_to_update = {}, {}
    todo = {worker: deque(ops) for worker, ops in lists.items()}
    outbox = dict.fromkeys(lists)

    def step(worker):
        if outbox[worker] is not None:
            channel, message = outbox[worker]
            if len(channels.setdefault(channel, deque())) >= capacity:
                return False
            channels[channel].append(message)
            outbox[worker] = None
            return True
        if not todo[worker]:
            return False
        op = todo[worker][0]
        if isinstance(op, Update):
            ready = waiting_to_update.setdefault((op.stage, op.version), set())
            ready.add(worker)
            if len(ready) < layout.replicas(op.stage):
                return False
            for replica in ready:
                assert todo[replica].popleft() == op
            return True
        source = target = None
        if isinstance(op, Forward):
            source = ("f", op.stage, worker, peer_before(layout, op)) if op.stage else None
            if op.stage < last:
                target = ("f", op.stage + 1, layout.worker(op.stage + 1, op.microbatch), worker)
        elif not isinstance(op, BackwardWeight):
            source = ("b", op.stage, worker, peer_behind(layout, op)) if op.stage < last else None
            if op.stage > 0:
                target = ("b", op.stage - 1, layout.worker(op.stage - 1, op.microbatch), worker)
        if source is not None:
            if not channels.get(source):
                return False
            assert channels[source].popleft() == op.microbatch
        todo[worker].popleft()
        if target is not None:
            outbox[worker] = (target, op.microbatch)
        return True

    while any(todo.values()) or any(message is not None for message in outbox.values()):
        moved = [step(worker) for worker in lists]
        if not any(moved):
            return False
    return True


@given(cases())
def test_no_schedule_deadlocks_on_channels_with_the_room_it_asks_for(case):
    schedule, layout, count = case
    room = messages_per_channel(schedule, layout)
    if schedule is Schedule.INTERLEAVED:
        assert room == len(layout.workers)
    elif layout.shared:
        room = max(in_flight(schedule, layout, stage, count) for stage in range(len(layout.stages)))
    else:
        assert room == 1
    assert runs_on_channels_of(room, layout, operations(schedule, layout, count))


@given(cases())
def test_no_more_activations_and_versions_are_in_flight_than_promised(case):
    schedule, layout, count = case
    lists = operations(schedule, layout, count)
    for stage, workers in enumerate(layout.stages):
        if schedule is Schedule.INTERLEAVED:
            continue
        promised = in_flight(schedule, layout, stage, count)
        versions = {Schedule.STASH: promised, Schedule.TWO_BUFFERED: 2}.get(schedule, 1)
        for worker in workers:
            for held, used in held_over_time(lists[worker], stage):
                assert held <= promised
                assert used <= versions


@given(folded(), microbatches)
def test_interleaved_workers_hold_what_is_promised_when_stages_divide_evenly(layout, count):
    workers = len(layout.workers)
    if len(layout.stages) % workers or count % workers:
        return
    for worker, ops in operations(Schedule.INTERLEAVED, layout, count).items():
        held = 0
        for op in ops:
            held += isinstance(op, Forward) - isinstance(op, Backward)
            assert held <= interleaved_depth(layout, worker)


@given(replicated, st.integers(1, 64))
def test_two_buffers_use_the_same_version_of_a_microbatch_in_every_stage(layout, count):
    versions = {}
    for ops in operations(Schedule.TWO_BUFFERED, layout, count).values():
        for op in ops:
            if isinstance(op, Forward):
                assert versions.setdefault(op.microbatch, op.version) == op.version
                assert op.version == max(0, op.microbatch // batch_of_two_buffers(layout) - 1)


@given(cases())
def test_replicas_of_a_stage_make_the_same_updates(case):
    schedule, layout, count = case
    lists = operations(schedule, layout, count)
    for stage, workers in enumerate(layout.stages):
        updates = {
            tuple(op for op in lists[w] if isinstance(op, Update) and op.stage == stage) for w in workers
        }
        assert len(updates) == 1
        (made,) = updates
        assert [op.version for op in made] == list(range(1, len(made) + 1))
        if schedule.synchronous:
            assert len(made) == 1


def test_one_forward_one_backward_fills_alternates_and_drains():
    lists = operations(Schedule.FLUSH, straight_layout([1, 1]), 3)
    shown = {
        worker: " ".join(f"{type(op).__name__[0]}{getattr(op, 'microbatch', '')}" for op in ops)
        for worker, ops in lists.items()
    }
    assert shown == {0: "F0 F1 B0 F2 B1 B2 U", 1: "F0 B0 F1 B1 F2 B2 U"}


def test_stashing_gives_each_forward_the_newest_weights_its_stage_has():
    ops = operations(Schedule.STASH, straight_layout([1, 1]), 4)[0]
    assert [(op.microbatch, op.version) for op in ops if isinstance(op, Forward)] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 2),
    ]


@given(replicated, microbatches, st.integers(1, 12))
def test_a_deeper_first_stage_still_runs_and_keeps_its_promise(layout, count, extra):
    depth = math.ceil(layout.devices_from(0) / layout.replicas(0)) + extra
    lists = operations(Schedule.FLUSH, layout, count, {0: depth})
    room = messages_per_channel(Schedule.FLUSH, layout, {0: depth})
    assert room == 1 + extra
    assert runs_on_channels_of(room, layout, lists)
    assert max(held for held, _ in held_over_time(lists[layout.stages[0][0]], 0)) <= depth


def test_depths_that_would_deadlock_are_refused_with_what_is_needed():
    with pytest.raises(PlanError, match="give stage 0 at least 3"):
        operations(Schedule.FLUSH, straight_layout([1, 1, 1]), 8, {0: 1, 1: 3})


@pytest.mark.parametrize(
    ("schedule", "layout", "count", "depths", "message"),
    [
        (Schedule.FLUSH, straight_layout([1]), 0, None, "found 0 microbatches"),
        (Schedule.FLUSH, straight_layout([1]), 2, {3: 1}, "stage below 1"),
        (Schedule.INTERLEAVED, straight_layout([2, 1]), 2, None, "found replicated stages"),
    ],
)
def test_what_no_schedule_can_run_is_refused(schedule, layout, count, depths, message):
    with pytest.raises(PlanError, match=message):
        operations(schedule, layout, count, depths)


def runs_through(schedule: Schedule, layout: Layout, microbatches: int, depths: dict[int, int]) -> bool:
    """Whether the schedule's orders come to their end, written down without a check of depths."""
    lists = operations(schedule, layout, microbatches, depths, check=False)
    costs = [StageCosts(1.0, 2.0, 1.0)] * len(layout.stages)
    try:
        simulate(layout, lists, costs, lambda sender, receiver: SimulatedLink(1e9))
    except PlanError:
        return False
    return True


@given(
    st.sampled_from([Schedule.STASH, Schedule.TWO_BUFFERED, Schedule.FLUSH, Schedule.GPIPE, Schedule.NONE]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 60),
    st.data(),
)
def test_depths_are_refused_exactly_where_a_simulated_run_stops(
    schedule: Schedule, stages: list[tuple[int, int]], microbatches: int, data: st.DataObject
) -> None:
    layout = straight_layout([replicas for replicas, _ in stages])
    chosen = data.draw(st.sets(st.integers(0, len(stages) - 1), min_size=1))
    depths = {stage: stages[stage][1] for stage in chosen}
    try:
        operations(schedule, layout, microbatches, depths)
        accepted = True
    except PlanError:
        accepted = False
    assert accepted == runs_through(schedule, layout, microbatches, depths)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 1e6, 1e7, 1e8])), min_size=2, max_size=4),
    st.floats(0.05, 1.0),
)
def test_depths_that_hide_messages_never_stop_a_pipeline(
    stages: list[tuple[int, float]], bottleneck_s: float
) -> None:
    layout = straight_layout([replicas for replicas, _ in stages])
    fields = [SimpleNamespace(output_bytes=size, replicas=replicas) for replicas, size in stages]
    cluster = machines(len(layout.workers), 1e9)
    depths = dict(enumerate(depths_that_hide_messages(fields, cluster, layout, bottleneck_s)))
    most = 3 * max(depth * layout.replicas(stage) for stage, depth in depths.items())
    for schedule in (Schedule.STASH, Schedule.FLUSH):
        assert runs_through(schedule, layout, most, depths)


def test_depths_that_hide_messages_count_whole_rounds_of_replicas() -> None:
    layout = straight_layout((2, 4, 3, 1))
    assert not runs_through(Schedule.STASH, layout, 60, {0: 8, 1: 3, 2: 4, 3: 1})
    assert runs_through(Schedule.STASH, layout, 60, {0: 8, 1: 4, 2: 4, 3: 1})
