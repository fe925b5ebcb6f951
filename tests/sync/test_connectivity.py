"""Decisions about groups: connected when they say so, pairs that match, shards that balance."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from plait.sync.averaging.group_graph import (
    asked_by,
    bipartite_neighbours,
    components,
    disconnected,
    pairs,
    recent,
    remembered,
    shards,
)
from plait.sync.averaging.partial_reduce_rules import (
    VOID,
    Arrival,
    Closed,
    Open,
    Round,
    Rules,
    is_behind,
    may_close,
    next_round,
    read_outcome,
    read_round,
    with_members,
)
from support.averaging import first_disconnected

RANKS = st.integers(0, 7)
GROUP = st.lists(RANKS, min_size=1, max_size=8, unique=True).map(tuple)
GROUPS = st.lists(GROUP, max_size=30)
EVERY = st.integers(1, 12)
ALL = tuple(range(8))


def reachable(start: int, groups: list[tuple[int, ...]]) -> set[int]:
    """By spreading from one worker through the groups until nothing changes."""
    found = {start}
    while True:
        wider = found.union(*(g for g in groups if found & set(g)))
        if wider == found:
            return found
        found = wider


@given(GROUPS)
def test_components_are_what_spreads_through_the_groups(groups: list[tuple[int, ...]]):
    for part in components(groups, ALL):
        assert set(part) == reachable(min(part), groups)


@given(GROUPS, GROUP, EVERY)
def test_a_group_with_someone_of_each_part_that_was_cut_off_connects_all(
    past: list[tuple[int, ...]], group: tuple[int, ...], every: int
):
    missing = disconnected(past, group, ALL, every)
    whole = (*group, *(min(part) for part in missing))
    # Someone of each part may push the oldest group out of the window: then more are asked for.
    while more := disconnected(past, whole, ALL, every):
        assert len(set(whole)) < 8
        whole = (*whole, *(min(part) for part in more))
    assert set(group) <= set(whole)


@given(GROUPS, GROUP, EVERY)
def test_what_is_remembered_is_enough_to_decide(
    past: list[tuple[int, ...]], group: tuple[int, ...], every: int
):
    kept = remembered(past, 8, every)
    assert disconnected(kept, group, ALL, every) == disconnected(past, group, ALL, every)
    assert sum(map(len, kept)) < 8 * every + 8


@given(st.lists(GROUP, min_size=30, max_size=40), EVERY)
def test_groups_chosen_by_the_rule_never_leave_anyone_out(proposed: list[tuple[int, ...]], every: int):
    taken: list[tuple[int, ...]] = []
    for group in proposed:
        while missing := disconnected(taken, group, ALL, every):
            group = (*group, *(min(part) for part in missing))
        taken.append(group)
        if sum(map(len, taken)) >= every * 8:
            assert reachable(0, list(recent(taken, 8, every))) == set(ALL)
    assert first_disconnected(taken, ALL, every) is None


def test_two_camps_that_never_mix_are_found_out():
    groups = [(0, 1, 2, 3), (4, 5, 6, 7)] * 10
    assert first_disconnected(groups, ALL, 3) == 5
    assert disconnected(groups, (0, 1), ALL, 3) == [frozenset({4, 5, 6, 7})]


@given(st.integers(0, 9), st.integers(0, 99), st.sets(RANKS, min_size=1))
def test_pairs_match_and_leave_one_out_at_most(seed: int, round_: int, members: set[int]):
    found = pairs(seed, round_, members)
    assert all(found[found[a]] == a and found[a] != a for a in found)
    assert len(found) == len(members) - len(members) % 2
    assert found == pairs(seed, round_, sorted(members, reverse=True))


@given(st.sets(RANKS, min_size=2), st.sampled_from(["complete", "ring"]))
def test_neighbours_know_each_other_and_lie_on_other_sides(members: set[int], graph: str):
    order = sorted(members)
    for rank in members:
        for other in bipartite_neighbours(rank, members, graph):
            assert (order.index(rank) + order.index(other)) % 2 == 1
            assert rank in bipartite_neighbours(other, members, graph)


@given(st.sets(RANKS, min_size=2), st.sampled_from(["complete", "ring"]))
def test_the_remaining_workers_are_connected_by_requests_and_no_requester_is_asked(
    living: set[int], graph: str
):
    asked = {rank: asked_by(rank, living, graph) for rank in living}
    assert all(not asked[other] for own in asked.values() for other in own)
    assert len(components([(rank, *own) for rank, own in asked.items()], living)) == 1


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_shards_hold_each_tensor_once_and_differ_by_one_tensor_at_most(sizes: list[int], servers: int):
    kept = shards(sizes, servers)
    assert sorted(i for own in kept for i in own) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in own) for own in kept]
    assert max(loads) - min(loads) <= max(sizes)


def test_a_round_survives_being_written_down():
    before = Round(3, (1, 4), (4,), ((1, 2.5), (4, 1794721899.8039)), ((0, 1), (2,)), 2.25)
    assert read_round(3, before.text()) == before
    opened = Open((Arrival(4, -1, 0.25, 1.5), Arrival(1, 2, 0.125, 1.75)))
    for outcome in (opened, Closed(before)):
        assert read_outcome(3, outcome.text().encode()) == outcome
    assert opened.leader == 4
    assert read_outcome(3, VOID.encode()) is None
    assert next_round(before, 4, 8, 10).past == ((0, 1), (2,), (1, 4))


def closes(members: tuple[int, ...], waited_s: float, expected: dict[int, float], **rules: int) -> bool:
    round_ = Round(9, members, expected=tuple(expected.items()))
    return may_close(round_, ALL[:4], waited_s, 100.0, 1.0, dataclasses.replace(Rules(), **rules))


def test_a_round_closes_when_all_are_in_or_nobody_else_is_about_to_come():
    assert closes((0, 1, 2, 3), 0.0, {})
    assert not closes((0, 1), 0.0, {2: 100.05, 3: 103.0})
    assert closes((0, 1), 0.0, {2: 102.0, 3: 103.0})
    assert closes((0, 1), 0.11, {2: 100.05, 3: 103.0})
    # A first partner is waited for longer, unless everyone is known to be busy for longer still.
    assert not closes((0,), 0.5, {1: 100.9, 2: 102.0, 3: 103.0})
    assert closes((0,), 1.0, {1: 100.9, 2: 102.0, 3: 103.0})
    assert closes((0,), 0.0, {1: 101.1, 2: 102.0, 3: 103.0})
    assert not closes((0, 1), 0.2, {2: 101.0, 3: 102.0}, minimum=3)


def test_a_round_that_would_leave_someone_out_too_long_stays_open():
    past = ((0, 1), (0, 1), (2, 3), (2, 3))
    round_ = Round(9, (0, 1), expected=((2, 105.0), (3, 105.0)), past=past)
    assert not may_close(round_, ALL[:4], 5.0, 100.0, 1.0, Rules(every=2))
    wider = dataclasses.replace(round_, members=(0, 1, 2))
    assert may_close(wider, ALL[:4], 0.0, 100.0, 1.0, Rules(every=2))
    # In a pipeline, those who do not come when they should may wait for us in another stage.
    assert not may_close(round_, ALL[:4], 5.0, 106.0, 1.0, Rules(every=2, overdue=2.0))
    assert may_close(round_, ALL[:4], 5.0, 107.5, 1.0, Rules(every=2, overdue=2.0))
    # Those who are gone are not waited for.
    assert may_close(round_, ALL[:2], 0.0, 100.0, 1.0, Rules(every=2))


def test_a_worker_that_lives_and_never_comes_is_waited_for_once_and_no_more():
    rules, everyone = Rules(every=1, hung_s=300.0), (0, 1, 2)

    def opened(before: Round, at: float, now: float) -> tuple[Round, bool]:
        """The round after `before`, which two join `at` once, and whether it may close at `now`."""
        empty = next_round(before, before.number + 1, 3, 1)
        entries = [Arrival(0, before.number, 1.0, at), Arrival(1, before.number, 1.0, at)]
        round_ = with_members(empty, entries, everyone, now, 1)
        return round_, may_close(round_, everyone, now - at, now, 1.0, rules)

    assert not opened(Round(0, (0, 1)), 10.0, 309.0)[1]
    first, may = opened(Round(0, (0, 1)), 10.0, 310.0)
    assert may
    assert opened(first, 311.0, 311.0)[1]


def test_where_all_members_missed_many_rounds_their_states_count():
    past, entries = ((0, 1), (0, 1)), [Arrival(2, 10, 0.1, 0.0), Arrival(3, 11, 0.1, 0.0)]
    assert with_members(Round(50, past=past), entries, ALL[:4], 1.0, 10).behind == ()
    both = [*entries, Arrival(0, 49, 0.1, 0.0)]
    assert with_members(Round(50, past=past), both, ALL[:4], 1.0, 10).behind == (2, 3)


def test_a_worker_that_missed_many_rounds_counts_for_nothing():
    assert is_behind(Round(50, past=((0, 1), (2, 3))), 5, 20, 10)
    assert not is_behind(Round(50, past=((0, 1), (2, 5))), 5, 20, 10)
    assert not is_behind(Round(50), 5, -1, 10)
