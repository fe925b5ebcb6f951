"""Workers that join, leave and die while a sweep goes on: every trial comes to what it does on one worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core import events
from plait.core.run_events import ArrayChanged, TrialStep, WorkersChanged
from plait.launcher.run_dir import RunDir
from plait.schema.settings import UNVERIFIED, CheckpointSettings, EvaluateSettings, ModelSettings
from plait.training.checkpoint import list_checkpoints, load
from support.elastic_sweep import Change, run_elastic_sweep
from support.sweeping import same_table, sweep_here, sweep_of, trial_alone
from support.training import digits_job, largest_difference

JOB = digits_job(
    steps=12,
    model=ModelSettings("support.sweeping:norm_net"),
    evaluate=EvaluateSettings(every_steps=4),
    checkpoint=CheckpointSettings(every_steps=1000),
    log_every_steps=1,
    verify=UNVERIFIED,
)
SWEEPS = {
    "grid": sweep_of("optimizer.lr=log:1e-3:0.3:3", "seed=0,1", width=2, job=JOB),
    "halving": sweep_of("optimizer.lr=log:1e-3:0.3", width=2, job=JOB, kind="halving", trials=6, eta=2),
}
TPE = sweep_of("optimizer.lr=log:1e-3:0.3", width=2, job=JOB, kind="asha", trials=5, eta=2)


def recorded(folder: Path, kind: type) -> list[Any]:
    lines = events.read(RunDir(folder).events())
    return [line.event for line in lines if isinstance(line.event, kind)]


def redone(folder: Path) -> dict[int, int]:
    """How many steps each trial took more than once."""
    counts = Counter((event.trial, event.step) for event in recorded(folder, TrialStep))
    found = Counter[int]()
    for (trial, _), count in counts.items():
        found[trial] += count - 1
    return dict(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    """The result and the folder of each sweep in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: (sweep_here(sweep, folder / name), folder / name) for name, sweep in SWEEPS.items()}


def check_equal(expected: tuple[dict[str, Any], Path], found: dict[str, Any], folder: Path) -> None:
    """Every trial, their ranking and the best one's weights are those of the same sweep in one process."""
    table, other = expected
    assert same_table(table, found)
    ours, theirs = (load(list_checkpoints(each / "checkpoints")[0]) for each in (folder, other))
    assert largest_difference(ours.model, theirs.model) < 1e-9


# tests/test_engines.py has a grid; of halving, a worker is killed below.
@pytest.mark.extended
@pytest.mark.parametrize("name", SWEEPS)
def test_workers_that_join_and_leave_change_no_trial_and_repeat_no_step(
    name: str, alone: dict[str, Any], tmp_path: Path
):
    folder = tmp_path / "elastic"
    # The first worker, which coordinates, leaves; then the next one that does.
    script = [Change(0, 5, (0, 1, 2)), Change(0, 12, (1, 2)), Change(2, 9, (2,))]
    result, ended = run_elastic_sweep(SWEEPS[name], folder, (0,), *script)
    assert ended == [True] * 3
    assert result["reason"] == "finished"
    check_equal(alone[name], result, folder)
    assert set(redone(folder).values()) == {0}
    changes = recorded(folder, WorkersChanged)
    assert [each.members for each in changes] == [(0, 1, 2), (1, 2), (2,)]
    assert [(each.joined, each.left) for each in changes] == [((1, 2), ()), ((), (0,)), ((), (1,))]
    # A rung may have no more trials than the others took before the second worker came for some.
    assert {event.worker for event in recorded(folder, ArrayChanged) if event.trials} >= {0, 2}


@pytest.mark.parametrize(
    ("name", "victim", "after"),
    # With a launcher, workers of a grid are killed in test_sweep_elastic_launch.py.
    [pytest.param("grid", 1, 14, marks=pytest.mark.extended), ("halving", 0, 8)],
    ids=["grid, another", "halving, the coordinator"],
)
def test_the_trials_of_a_killed_worker_go_on_from_their_last_evaluation(
    name: str, victim: int, after: int, alone: dict[str, Any], tmp_path: Path
):
    folder = tmp_path / "elastic"
    rest = tuple(rank for rank in (0, 1, 2) if rank != victim)
    result, ended = run_elastic_sweep(SWEEPS[name], folder, (0, 1, 2), Change(victim, after, rest, lost=True))
    assert [rank for rank, each in enumerate(ended) if each is None] == [victim]
    check_equal(alone[name], result, folder)
    again = redone(folder)
    assert max(again.values()) <= 4
    assert sum(count > 0 for count in again.values()) <= 2
    assert [each.lost for each in recorded(folder, WorkersChanged)] == [(victim,)]


# Trials of a search that learns follow from the past alone in test_sweep_search.py.
@pytest.mark.extended
def test_drawn_trials_come_to_what_each_does_alone(tmp_path: Path):
    folder = tmp_path / "elastic"
    script = [Change(0, 5, (0, 1)), Change(0, 9, (1,), lost=True)]
    found, _ = run_elastic_sweep(TPE, folder, (0,), *script)
    assert [row["state"] for row in found["trials"]].count("finished") >= 1
    for row in found["trials"]:
        own = replace(TPE, train=replace(TPE.train, steps=row["step"]))
        by_itself, _ = trial_alone(own, row["values"], tmp_path / str(row["trial"]))
        assert row["metrics"] == pytest.approx(by_itself.test, abs=1e-9)


def test_a_sweep_that_has_too_few_workers_stops_with_its_trials_saved_and_goes_on(
    alone: dict[str, Any], tmp_path: Path
):
    folder = tmp_path / "elastic"
    found, _ = run_elastic_sweep(SWEEPS["grid"], folder, (0, 1), Change(0, 8, (1,), lost=True, stop=True))
    assert found["reason"] == "stopped"
    went_on = sweep_here(SWEEPS["grid"], folder, resume=True)
    check_equal(alone["grid"], went_on, folder)
