"""Workers that come and go while a run goes on: it ends as a run with the same workers throughout does."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core import events
from plait.core.errors import JobError
from plait.core.run_events import WorkersChanged
from plait.launcher.membership import Memberships
from plait.launcher.run_dir import RunDir
from plait.schema.settings import DataSettings, EvaluateSettings, ModelSettings, OptimizerSettings
from plait.schema.topology_spec import TopologySpec
from plait.training import components
from plait.training.checks.replicas import check_kept
from plait.training.run import Run
from support.elastic import membership, run_elastic
from support.silent_cases import CASES, HERE
from support.silent_cases import settings as case_settings
from support.training import PlainWorker, largest_difference, train_here, unverified_job


def test_workers_that_join_and_leave_change_no_step(tmp_path: Path):
    settings = unverified_job(
        steps=40, data=DataSettings("digits", 60), evaluate=EvaluateSettings(every_steps=15)
    )
    versions = [(0, (0, 1)), (5, (0, 1, 2, 3)), (14, (1, 3)), (22, (3,)), (29, (3, 4))]
    found = run_elastic(settings, tmp_path / "elastic", versions)
    _, alone = train_here(settings, tmp_path / "alone")
    # Those that have left have no result.
    assert [each["result"] and each["result"].reason for each in found] == [*[None] * 3, *["finished"] * 2]
    for rank in (3, 4):
        assert found[rank]["result"].step == 40
        assert largest_difference(found[rank]["weights"], alone) < 1e-9
    recorded = [
        line.event
        for rank in (0, 1, 3)
        for line in events.read(tmp_path / "elastic" / "events" / f"rank{rank}.jsonl")
    ]
    changes = [event for event in recorded if isinstance(event, WorkersChanged)]
    assert [change.members for change in changes] == [members for _, members in versions[1:]]
    assert [change.left for change in changes] == [(), (0, 2), (1,), ()]
    assert [change.joined for change in changes] == [(2, 3), (), (), (4,)]
    # What a policy asks for goes to the supervisor, once.
    assert ["ResizeRequest" in each["said"] for each in found] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("victim", "topology"), [(0, "default"), pytest.param(2, "native", marks=pytest.mark.extended)]
)
def test_the_step_in_which_a_worker_dies_is_taken_again_by_the_rest(
    victim: int, topology: str, tmp_path: Path
):
    settings = unverified_job(
        model=ModelSettings("support.elastic:MortalNet", {"dies_at": 12}),
        steps=20,
        data=DataSettings("digits", 60),
        topology=TopologySpec(topology),
    )
    rest = tuple(rank for rank in range(3) if rank != victim)
    found = run_elastic(
        settings,
        tmp_path / "elastic",
        [(0, (0, 1, 2))],
        victim=victim,
        after_loss=membership(2, rest, lost=(victim,)),
    )
    _, alone = train_here(settings, tmp_path / "alone")
    for rank in rest:
        # The forward of the step that nobody finished counts once, in running statistics too.
        assert largest_difference(found[rank]["weights"], alone) < 1e-9
    (change,) = (
        line.event
        for line in events.read(tmp_path / "elastic" / "events" / f"rank{rest[0]}.jsonl")
        if isinstance(line.event, WorkersChanged)
    )
    assert (change.step, change.members, change.lost) == (11, rest, (victim,))


def test_a_change_that_only_some_workers_know_of_is_taken_back_when_the_first_dies(tmp_path: Path):
    settings = unverified_job(steps=12, data=DataSettings("digits", 60))
    found = run_elastic(
        settings,
        tmp_path / "elastic",
        [(0, (0, 1, 2))],
        victim=0,
        after_loss=membership(2, (1, 2), lost=(0,)),
        is_half_told=True,
    )
    _, alone = train_here(settings, tmp_path / "alone")
    for rank in (1, 2):
        assert largest_difference(found[rank]["weights"], alone) < 1e-9


@pytest.mark.parametrize(
    ("kind", "loaders"),
    [pytest.param("digits", 2, marks=pytest.mark.extended), ("support.elastic:DigitStream", 1)],
)
def test_loader_processes_and_streams_go_on_at_the_same_sample(kind: str, loaders: int, tmp_path: Path):
    data = DataSettings(kind, 60, loaders=loaders)
    settings = unverified_job(steps=None, epochs=2, data=data)
    found = run_elastic(settings, tmp_path / "elastic", [(0, (0,)), (7, (0, 1)), (31, (1,))])
    result, alone = train_here(replace(settings, data=replace(data, loaders=0)), tmp_path / "alone")
    assert found[1]["result"].step == result.step
    assert largest_difference(found[1]["weights"], alone) < 1e-9


def test_a_worker_that_joins_has_what_the_optimizer_keeps_in_its_groups(tmp_path: Path):
    optimizer = OptimizerSettings("support.silent_cases:ScheduleFree", {"lr": 0.1})
    settings = unverified_job(steps=8, data=DataSettings("digits", 60), optimizer=optimizer)
    found = run_elastic(settings, tmp_path / "elastic", [(0, (0,)), (4, (0, 1))])
    _, alone = train_here(settings, tmp_path / "alone")
    for rank in (0, 1):
        assert largest_difference(found[rank]["weights"], alone) < 1e-9


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "EverySeventh",
            "forward of .*EverySeventh changes self.n, which a worker that joins",
        ),
        ("counting_block", "changes self.calls of 1, which a worker that joins"),
        ("Net", ""),
    ],
)
def test_what_forward_keeps_in_python_and_a_joiner_would_not_have_is_refused(
    model: str, words: str, tmp_path: Path
):
    settings = replace(case_settings(CASES["extra state"], "one"), model=ModelSettings(f"{HERE}{model}"))
    worker: Any = PlainWorker()
    worker.memberships = Memberships(0)
    run = Run(worker, settings, components.build(settings, torch.device("cpu")), RunDir(tmp_path))
    with pytest.raises(JobError, match=words) if words else contextlib.nullcontext():
        check_kept(run)
