"""Who takes part in an elastic job, derived from events: no process is started here."""

from __future__ import annotations

import random

import pytest

from plait.core.errors import InputError
from plait.launcher.membership import Membership, Memberships
from plait.launcher.membership_decisions import ControlRequest, NextSteps, Roster, StaleVersionError
from plait.schema.hosts import Host
from plait.schema.placement import ElasticRules


def roster_of(workers: int, most: int = 6, least: int = 1) -> Roster:
    """A job on one host whose workers have all begun."""
    roster = Roster((Host("here", workers),), [most], ElasticRules(least, most))
    join(roster)
    return roster


def join(roster: Roster) -> Membership:
    """All members take their places."""
    for member in roster.membership.members:
        roster.on_joined(member, roster.membership.version)
    return roster.membership


def get_ready(roster: Roster) -> list[int]:
    """Workers that are to be started are, and get ready."""
    started = [start.worker for start in roster.next_steps().start]
    for worker in started:
        roster.on_ready(worker)
    return started


def test_joiners_become_members_once_all_of_them_are_ready():
    roster = roster_of(2)
    roster.apply(ControlRequest(4))
    starts = roster.next_steps().start
    assert [(start.worker, start.slot) for start in starts] == [(2, 2), (3, 3)]
    roster.on_ready(3)
    assert roster.next_steps().publish is None
    roster.on_ready(2)
    published = roster.next_steps().publish
    assert published is not None
    assert (published.version, published.members) == (2, (0, 1, 2, 3))
    assert not roster.all_joined
    join(roster)
    assert roster.next_steps() == NextSteps()


def test_nobody_joins_or_leaves_while_members_take_their_places():
    roster = roster_of(3)
    roster.apply(ControlRequest(2))
    assert roster.next_steps().publish is not None
    roster.apply(ControlRequest(1))
    assert roster.next_steps().publish is None
    join(roster)
    published = roster.next_steps().publish
    assert published is not None
    assert published.members == (0,)


def test_workers_that_fail_before_they_take_part_are_started_elsewhere_and_then_no_more():
    roster = Roster((Host("w0", 2), Host("w1", 0), Host("w2", 0)), [2, 2, 2], ElasticRules(1, 6))
    join(roster)
    roster.apply(ControlRequest(3))
    hosts = []
    for stage in ("starting", "ready", "member"):
        (start,) = roster.next_steps().start
        hosts.append(start.host)
        if stage != "starting":
            roster.on_ready(start.worker)
        if stage == "member":
            assert roster.next_steps().publish is not None
        roster.on_gone(start.worker, "FileNotFoundError: no data")
        if stage == "member":
            assert roster.next_steps().publish is not None
            join(roster)
    assert hosts == [1, 2, 1]
    assert roster.gives_up_joiners
    assert roster.next_steps() == NextSteps()
    roster.apply(ControlRequest(4))
    assert [start.host for start in roster.next_steps().start] == [2, 2]


@pytest.mark.parametrize("workers", [2.5, "3", True])
def test_a_number_of_workers_that_is_none_is_refused(workers: object):
    with pytest.raises(InputError, match=r"workers: found .*, expected a whole number"):
        roster_of(2).apply(ControlRequest(workers))


def test_any_worker_may_leave():
    roster = roster_of(3)
    roster.apply(ControlRequest(2, without=(0,)))
    published = roster.next_steps().publish
    assert published is not None
    assert (published.members, published.lost) == ((1, 2), ())


def test_a_lost_worker_is_left_out_at_once_and_replaced_when_another_is_ready():
    roster = roster_of(3)
    roster.on_gone(1, "ended by SIGKILL")
    published = roster.next_steps().publish
    assert published is not None
    assert (published.members, published.lost) == ((0, 2), (1,))
    assert published.why == "worker 1 ended by SIGKILL"
    assert roster.next_steps().start == ()
    join(roster)
    assert get_ready(roster) == [3]
    published = roster.next_steps().publish
    assert published is not None
    assert published.members == (0, 2, 3)


def test_only_what_makes_up_for_a_loss_is_in_the_place_of_lost_workers():
    roster = roster_of(2)
    roster.on_gone(1, "ended by SIGKILL")
    assert roster.next_steps().publish is not None
    join(roster)
    reasons = []
    for request in (ControlRequest(), ControlRequest(3), ControlRequest(4, by="a person", why="room")):
        roster.apply(request)
        get_ready(roster)
        published = roster.next_steps().publish
        assert published is not None
        reasons.append((published.by, published.why))
        join(roster)
    assert reasons == [
        ("launch", "in the place of lost workers"),
        ("resize", ""),
        ("a person", "room"),
    ]


def test_where_no_host_takes_more_workers_nobody_is_started_for_one_that_is_lost():
    roster = Roster((Host("here", 3),), [0], ElasticRules())
    join(roster)
    roster.on_gone(1, "ended by SIGKILL")
    published = roster.next_steps().publish
    assert published is not None
    assert (published.members, published.lost) == ((0, 2), (1,))
    join(roster)
    assert roster.next_steps() == NextSteps()


def test_a_loss_while_members_take_their_places_makes_another_version():
    roster = roster_of(3)
    for worker in (0, 2):
        roster.on_gone(worker, "ended")
        assert roster.next_steps().publish is not None
    assert (roster.membership.version, roster.membership.members) == (3, (1,))
    assert roster.membership.lost == (0, 2)


def test_too_few_workers_end_the_job():
    roster = roster_of(3, least=2)
    roster.on_gone(0, "ended")
    assert roster.next_steps().too_few is None
    roster.on_gone(1, "ended by SIGKILL")
    steps = roster.next_steps()
    assert steps.publish is not None
    assert steps.publish.members == (2,)
    assert steps.too_few == (
        "1 of at least 2 workers (parallel.min_workers) are left: worker 1 ended by SIGKILL"
    )
    join(roster)
    assert roster.next_steps().start == ()


def test_workers_that_never_get_ready_are_started_a_few_times_only():
    roster = roster_of(1)
    roster.apply(ControlRequest(2))
    started = 0
    while starts := roster.next_steps().start:
        started += len(starts)
        roster.on_gone(starts[0].worker, "ended with status 1")
    assert started == 3
    roster.apply(ControlRequest(2))
    assert roster.next_steps().start != ()


def test_losses_without_a_step_in_between_end_the_job():
    roster = roster_of(2)
    for number in range(50):
        roster.on_progress(number if number < 10 else 10)
        roster.on_gone(roster.membership.members[-1], "ended by SIGKILL")
        if (steps := roster.next_steps()).too_few is not None:
            break
        join(roster)
        get_ready(roster)
        roster.next_steps()
        join(roster)
    assert steps.publish is None
    assert "the job came no further" in str(steps.too_few)
    assert 10 < number < 25


def test_a_stale_version_is_refused_and_changes_nothing():
    roster = roster_of(2)
    roster.apply(ControlRequest(3, version=1))
    assert roster.target.version == 2
    with pytest.raises(StaleVersionError, match="found 1, but .* to 3 .version 2.; look at it again"):
        roster.apply(ControlRequest(4, version=1))
    assert roster.target.workers == 3


@pytest.mark.parametrize("workers", [0, 7, -1])
def test_a_number_of_workers_out_of_bounds_is_refused(workers: int):
    with pytest.raises(InputError, match=f"workers: found {workers}, expected 1 to 6"):
        roster_of(2).apply(ControlRequest(workers))


def test_hosts_say_how_many_workers_each_of_them_holds():
    roster = Roster((Host("w0", 2), Host("w1", 2)), [2, 2], ElasticRules(1, 8))
    join(roster)
    roster.apply(ControlRequest(hosts=(Host("w1", 3),)))
    assert [(start.host, start.slot) for start in roster.next_steps().start] == [(1, 2)]
    roster.on_ready(4)
    published = roster.next_steps().publish
    assert published is not None
    assert (published.members, published.hosts) == ((2, 3, 4), ("w1", "w1", "w1"))
    with pytest.raises(InputError, match="hosts: found 'w7', expected hosts that the job has: w0, w1"):
        roster.apply(ControlRequest(hosts=(Host("w7", 1),)))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_wanted_number_of_workers_is_reached(seed: int):
    draw = random.Random(seed)
    roster = roster_of(3)
    alive: set[int] = {0, 1, 2}
    for step in range(60):
        roster.on_progress(step)
        act = draw.randrange(4)
        if act == 0:
            roster.apply(ControlRequest(draw.randint(1, 6)))
        elif act == 1 and len(set(roster.membership.members) & alive) > 1:
            victim = draw.choice(sorted(alive))
            alive.discard(victim)
            roster.on_gone(victim, "ended")
        _join_all(roster, alive)
        assert set(roster.membership.members) <= alive
        assert list(roster.membership.members) == sorted(roster.membership.members)
    assert len(roster.membership.members) == roster.target.workers


def _join_all(roster: Roster, alive: set[int]) -> None:
    """Do what the roster says until there is nothing more to do."""
    for _ in range(20):
        steps = roster.next_steps()
        assert steps.too_few is None
        for start in steps.start:
            alive.add(start.worker)
            roster.on_ready(start.worker)
        join(roster)
        alive -= {*steps.end, *roster.dismiss()}


def test_a_job_whose_members_have_finished_waits_for_no_joiner():
    roster = roster_of(1)
    roster.apply(ControlRequest(2))
    get_ready(roster)
    assert roster.next_steps().publish is not None
    assert not roster.is_over()
    roster.on_done(0)
    assert roster.is_over()


def test_a_member_that_is_lost_when_others_are_done_leaves_nothing_to_a_joiner():
    roster = roster_of(2)
    roster.apply(ControlRequest(3))
    get_ready(roster)
    assert roster.next_steps().publish is not None
    roster.on_done(0)
    roster.on_gone(1, "ended by SIGKILL")
    assert roster.next_steps() == NextSteps()
    assert roster.is_over()


def test_a_worker_that_was_to_leave_goes_on_where_all_others_are_lost():
    roster = roster_of(2)
    roster.apply(ControlRequest(1))
    published = roster.next_steps().publish
    assert published is not None
    assert (published.members, roster.leavers()) == ((0,), [1])
    roster.on_gone(0, "hung")
    published = roster.next_steps().publish
    assert published is not None
    assert (published.members, published.lost) == ((1,), (0,))


def test_workers_that_all_leave_hand_their_state_to_those_that_come():
    roster = roster_of(1)
    roster.apply(ControlRequest(1, without=(0,)))
    assert get_ready(roster) == [1]
    published = roster.next_steps().publish
    assert published is not None
    assert published.members == (0, 1)
    join(roster)
    published = roster.next_steps().publish
    assert published is not None
    assert (published.members, roster.leavers()) == ((1,), [0])


def test_members_that_cannot_work_together_are_all_woken_and_given_a_few_more_chances():
    roster = roster_of(2)
    again = roster.form_again(1, "a connection broke").publish
    assert again is not None
    assert (again.members, again.lost, again.breaks) == ((0, 1), (), True)
    memberships = Memberships(0)
    memberships.enter(Membership(1, (0, 1), ("here", "here")))
    woken: list[str] = []
    memberships.on_loss(lambda loss: woken.append(str(loss)))
    memberships.put(again)
    assert woken == ["the workers cannot go on together: a connection broke"]
    assert roster.form_again(1, "reported late") == NextSteps()
    versions = range(2, 20)
    ends = [roster.form_again(version, "it broke").too_few for version in versions]
    assert "the workers cannot work together: it broke" in ends
