"""Elastic sweeps whose arrays several workers train: groups are formed of whoever is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_sweep_elastic import recorded, redone

from plait.core.errors import PeerError
from plait.core.run_events import WorkersChanged
from plait.launcher.membership import Membership, Memberships
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    UNVERIFIED,
    CheckpointSettings,
    EvaluateSettings,
    ModelSettings,
    SyncSettings,
)
from plait.schema.topology_spec import TopologySpec
from plait.sweeping.elastic.group_formation import WorkerGroups
from plait.sweeping.settings import SweepSettings
from support.elastic_sweep import Change, run_elastic_sweep
from support.plans import planned
from support.sweeping import same_table, sweep_of, sweep_rank
from support.training import digits_job, largest_difference, saved_weights
from support.world import run_ranks

DUE = {
    "evaluate": EvaluateSettings(every_steps=4),
    "checkpoint": CheckpointSettings(every_steps=1000),
    "log_every_steps": 1,
    "verify": UNVERIFIED,
}
# Enough that no group comes to the end of the sweep while another one forms.
STEPS = 24
# Larger rates make of the rounding of unlike widths more than 1e-10.
OVER = ("optimizer.lr=log:1e-3:0.03:3", "seed=0,1")
# Its result depends on which share of a batch each worker has.
DROPOUT = ModelSettings("support.training:small_net", {"dropout": 0.4})


def replicated(**search: object) -> SweepSettings:
    job = digits_job(steps=STEPS, model=DROPOUT, topology=TopologySpec("ring"), **DUE)
    over = ("optimizer.lr=log:1e-3:0.03",) if search else OVER
    return replace(sweep_of(*over, width=2, job=job, **search), replicas=2)


def in_stages() -> SweepSettings:
    return sweep_of(*OVER, width=2, job=planned((1, 1), Schedule.FLUSH, 3, steps=STEPS, **DUE))


def averaging() -> SweepSettings:
    """Two workers that average after every step: where intervals end makes no difference."""
    job = digits_job(steps=STEPS, sync=SyncSettings("pair-sync"), **DUE)
    return replace(sweep_of(*OVER, width=2, job=job), replicas=2)


SWEEPS: dict[str, Callable[[], SweepSettings]] = {
    "replicas": replicated,
    "averaging": averaging,
    "halving": lambda: replicated(kind="halving", trials=6, eta=2),
    "stages": in_stages,
}


def check_as_with_fixed_workers(settings: SweepSettings, found: dict[str, Any], folder: Path) -> None:
    """Every trial, and the best one's weights, are those of one group that nobody left."""
    fixed = folder.parent / "fixed"
    expected = run_ranks(2, sweep_rank, settings, fixed)[0]
    assert found["reason"] == "finished"
    assert same_table(expected, found, tolerance=1e-10)
    assert largest_difference(saved_weights(folder), saved_weights(fixed)) < 1e-10


# That groups join and leave is a row of tests/test_engines.py; those of replicas form anew, whoever goes, in
# test_sweep_elastic_launch.py.
@pytest.mark.extended
@pytest.mark.parametrize("name", ["replicas", "halving", "stages", "averaging"])
def test_groups_that_lose_a_leaver_form_anew_and_no_step_is_repeated(name: str, tmp_path: Path):
    settings, folder = SWEEPS[name](), tmp_path / "elastic"
    # Worker 3 leaves the group of 2, which then waits until 4 comes; 0 leaves that of 1, who waits.
    script = [Change(0, 5, (0, 1, 2)), Change(0, 8, (0, 1, 2, 4)), Change(4, 4, (1, 2, 4))]
    result, ended = run_elastic_sweep(settings, folder, (0, 1, 2, 3), *script)
    assert ended == [True] * 5
    check_as_with_fixed_workers(settings, result, folder)
    assert set(redone(folder).values()) == {0}
    assert [each.members for each in recorded(folder, WorkersChanged)] == [
        change.members for change in script
    ]


# One of two replicas is killed in test_sweep_elastic_launch.py, and a lone worker of a sweep, too.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "victim"), [("stages", 1), ("averaging", 1), ("replicas", 0), ("replicas", 1), ("stages", 0)]
)
def test_the_trials_of_a_group_that_loses_a_worker_go_on_from_their_last_evaluation(
    name: str, victim: int, tmp_path: Path
):
    settings, folder = SWEEPS[name](), tmp_path / "elastic"
    rest = tuple(worker for worker in range(4) if worker != victim)
    script = [Change(victim, 6, rest, lost=True), Change(2, 8, (*rest, 4))]
    result, ended = run_elastic_sweep(settings, folder, (0, 1, 2, 3), *script)
    assert [worker for worker, each in enumerate(ended) if each is None] == [victim]
    check_as_with_fixed_workers(settings, result, folder)
    again = redone(folder)
    assert max(again.values()) <= 4
    # The other group goes on.
    assert sum(count > 0 for count in again.values()) <= 2


# Groups that are not elastic do in test_sweep_averaging.py.
@pytest.mark.extended
def test_groups_that_average_at_their_own_speed_do_not_meet_in_the_store(tmp_path: Path):
    job = digits_job(steps=12, sync=SyncSettings("partial-reduce"), **DUE)
    settings = replace(sweep_of(*OVER, width=2, job=job), replicas=2)
    result, ended = run_elastic_sweep(settings, tmp_path, (0, 1, 2, 3))
    assert ended == [True] * 4
    assert result["reason"] == "finished"
    assert {trial["state"] for trial in result["trials"]} == {"finished"}


def membership(
    version: int, *members: int, lost: tuple[int, ...] = (), group: int | None = None
) -> Membership:
    return Membership(version, members, ("here",) * len(members), lost, breaks=bool(lost), group=group)


def test_groups_stay_together_and_others_form_in_the_order_of_ranks():
    groups = WorkerGroups(2, membership(1, 0, 1, 2, 3, 4))
    assert [groups.number_of(worker) for worker in range(5)] == [1, 1, 2, 2, None]
    groups.follow(membership(2, 1, 2, 3, 4, lost=(0,)))
    assert [groups.number_of(worker) for worker in range(5)] == [None, 3, 2, 2, 3]
    assert groups.firsts == [2, 1]
    # Whose workers lost touch gets another number, and others that wait.
    groups.dissolve(3)
    groups.dissolve(3)
    assert [groups.number_of(worker) for worker in range(1, 5)] == [4, 2, 2, 4]


def test_workers_of_a_group_are_told_to_join_it_once_all_have_come_and_none_has_gone():
    groups = WorkerGroups(2, membership(1, 0, 1, 2))
    assert groups.arrive(0) is None
    groups.withdraw(0)
    assert groups.arrive(1) is None
    assert groups.arrive(2) is None
    found = groups.arrive(0)
    assert found == groups.arrive(1) == membership(1, 0, 1, group=1)


def test_a_group_is_woken_by_the_loss_of_its_own_workers_only():
    memberships = Memberships(1)
    memberships.enter(membership(1, 0, 1, group=1))
    memberships.put(membership(2, 0, 1, 3, lost=(2,)))
    assert memberships.loss() is None
    assert memberships.is_asked
    memberships.stay(2)
    assert not memberships.is_asked
    memberships.put(membership(3, 1, 3, lost=(2, 0)))
    assert str(memberships.loss()) == "worker 0 is lost"


def test_the_method_of_an_object_that_is_gone_is_not_called_by_a_loss():
    class Engine:
        def fail(self, loss: PeerError) -> None:
            woken.append(loss)

    woken: list[PeerError] = []
    memberships, first, second = Memberships(1), Engine(), Engine()
    memberships.enter(membership(1, 0, 1))
    memberships.on_loss(first.fail)
    memberships.on_loss(second.fail)
    del first
    memberships.put(membership(2, 1, lost=(0,)))
    assert len(woken) == 1
