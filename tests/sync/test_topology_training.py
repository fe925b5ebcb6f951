"""Topologies in training: a job over any of them equals one process; wrong topologies are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from plait.adapt.changes import TopologyChange
from plait.api.world import choose_device
from plait.core import events as core_events
from plait.core.errors import InputError
from plait.core.run_events import Changed
from plait.jobs.sweep import make_sweep
from plait.jobs.train import train
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.job import make_job
from plait.schema.settings import OptimizerSettings, TrainSettings
from plait.schema.topology import TOPOLOGIES
from plait.schema.topology_spec import read_topology_spec
from plait.sync.allreduce import autotune
from plait.sync.allreduce.autotune import TopologyChosen, candidates
from plait.training import components
from plait.training.choose_engine import make_job_loop, whole_model_engine
from plait.training.run import Run
from plait.training.run_loop import RunLoop
from support.changes import StepTable
from support.plans import unverified_plan
from support.training import PlainWorker, largest_difference, train_here, unverified_job
from support.world import run_ranks

JOB = unverified_job(
    steps=6, accumulate=2, clip_norm=0.5, optimizer=OptimizerSettings("adamw", {"lr": 0.003})
)
CHAIN = [{"reduce": [[0, 1], [1, 2]]}, {"reduce": [[2, 0], [1, 0]], "broadcast": [[0, 2], [2, 1]]}]


def chain(hosts: list[str]) -> list[dict[str, Any]]:
    """Graphs as a user's function makes them."""
    assert len(hosts) == 3
    return CHAIN


def train_over_each(rank: int, jobs: dict[str, TrainSettings], folder: Path) -> dict[str, Any]:
    found = {}
    for number, (name, job) in enumerate(jobs.items()):
        _, weights = train_here(job, folder / str(number))
        found[name] = {key: value.tolist() for key, value in weights.items()}
    return found


def test_three_workers_equal_one_process_over_every_topology(tmp_path: Path):
    file = tmp_path / "chain.yaml"
    file.write_text(json.dumps({"graphs": CHAIN}))
    names = [*TOPOLOGIES, "star:1", "auto", str(file), "test_topology_training:chain"]
    jobs = {name: dataclasses.replace(JOB, topology=read_topology_spec(name)) for name in names}
    _, alone = train_here(JOB, tmp_path / "one")
    for found in run_ranks(3, train_over_each, jobs, tmp_path / "many"):
        for name in names:
            assert largest_difference(alone, found[name]) < 1e-10, name
    log = tmp_path / "many" / str(names.index("auto")) / "events" / "rank0.jsonl"
    (chosen,) = (r.event for r in core_events.read(log) if isinstance(r.event, TopologyChosen))
    tried = {"native" if topology is None else topology.name for topology in candidates(["localhost"] * 3)}
    assert set(chosen.seconds) == tried
    assert chosen.topology in tried
    assert chosen.topology in chosen.reason


def train_and_go_on(rank: int, job: TrainSettings, folder: Path) -> None:
    for resume in (False, True):
        settings = dataclasses.replace(job, steps=2 + 2 * resume, topology=read_topology_spec("auto"))
        parts = components.build(settings, choose_device("cpu", 0))
        with mock.patch.object(autotune, "choose", mock.Mock(wraps=autotune.choose)) as choose:
            loop = make_job_loop(PlainWorker(), settings, parts, RunDir(folder), resume)
            loop.train(resume)
        assert not (resume and choose.called)
        dist.barrier()


@pytest.mark.parametrize(
    ("stages", "workers"), [pytest.param((), (0, 1, 2), marks=pytest.mark.extended), ((1, 2), (1, 2))]
)
def test_a_resumed_run_sums_over_the_topology_that_was_measured(
    stages: tuple[int, ...], workers: tuple[int, ...], tmp_path: Path
):
    run_ranks(3, train_and_go_on, unverified_plan(stages, Schedule.FLUSH) if stages else JOB, tmp_path)
    record = [recorded.event for recorded in core_events.read(RunDir(tmp_path).events())]
    assert [event.workers for event in record if isinstance(event, TopologyChosen)] == [workers]


def train_and_switch(rank: int, folder: Path) -> dict[str, Any]:
    """Take the job's steps, with another topology after each."""
    parts = components.build(JOB, choose_device("cpu", 0))
    run = Run(PlainWorker(), JOB, parts, RunDir(folder))
    names = ["ring", "native", "clique", "star:2", "binary-tree", "native"]
    changes = StepTable({step: TopologyChange(name) for step, name in enumerate(names, 1)})
    RunLoop(run, whole_model_engine(run), [changes]).train(resume=False)
    return {key: value.tolist() for key, value in parts.model.state_dict().items()}


def test_a_run_that_switches_after_every_step_takes_the_steps_of_one_process(tmp_path: Path):
    _, alone = train_here(JOB, tmp_path / "one")
    for found in run_ranks(3, train_and_switch, tmp_path / "many"):
        assert largest_difference(alone, found) < 1e-10
    log = tmp_path / "many" / "events" / "rank0.jsonl"
    changed = [r.event for r in core_events.read(log) if isinstance(r.event, Changed)]
    assert [(each.step, each.change["topology"], each.by) for each in changed] == [
        (1, "ring", "table"),
        (2, "native", "table"),
        (3, "clique", "table"),
        (4, "star:2", "table"),
        (5, "binary-tree", "table"),
    ]


def train_over_chain(rank: int, steps: int, folder: Path) -> tuple[str, int]:
    """Take steps, over the topology of a function after the first; or go on from the checkpoint."""
    settings = dataclasses.replace(JOB, steps=steps, topology=read_topology_spec("ring"))
    run = Run(PlainWorker(), settings, components.build(settings, choose_device("cpu", 0)), RunDir(folder))
    changes = StepTable({1: TopologyChange("test_topology_training:chain")})
    result = RunLoop(run, whole_model_engine(run), [changes]).train(resume=steps > 2)
    return run.settings.topology.name, result.step


@pytest.mark.parametrize(
    ("workers", "kept"),
    [(3, "test_topology_training:chain"), pytest.param(2, "ring", marks=pytest.mark.extended)],
)
def test_a_run_goes_on_over_the_function_that_a_policy_chose_if_it_has_graphs_for_the_workers(
    workers: int, kept: str, tmp_path: Path
):
    run_ranks(3, train_over_chain, 2, tmp_path)
    assert run_ranks(workers, train_over_chain, 4, tmp_path) == [(kept, 4)] * workers


def job(**parallel: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "model": "support.training:small_net",
        "data": {"kind": "digits", "batch_size": 64},
        "steps": 1,
        "parallel": {"workers": 3, **parallel},
    }


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"topology": "rign"}, "parallel.topology: found 'rign', .* did you mean 'ring'"),
        ({"topology": "star:3"}, "parallel.topology: found 'star:3', expected a root from 0 to 2"),
        ({"topology": "no.json"}, "parallel.topology: no.json: no such file; expected graphs"),
        ({"topology": "ring", "sync": "sma"}, "parallel.topology: belongs to an all-reduce"),
        ({"topology": "a.b:c", "plan": "auto"}, "parallel.topology: found 'a.b:c' with parallel.plan 'auto'"),
    ],
)
def test_a_topology_that_cannot_be_used_is_refused_before_anything_starts(
    parallel: dict[str, Any], words: str
):
    with pytest.raises(InputError, match=words):
        make_job(job(**parallel))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"graphs": [{"reduce": [[1, 0], [0, 1], [2, 0]]}]}', r"g.json\[0\].reduce: a cycle, 0 - 1 - 0"),
        ("graphs: [{reduce: [[1, 0]]}]", r"g.json\[0\].reduce: missing rank 2"),
        ("edges: []", "g.json has no list of graphs"),
        ("{", "g.json:1: not YAML"),
    ],
)
def test_a_file_of_graphs_is_checked_against_the_workers_that_sum(text: str, words: str, tmp_path: Path):
    file = tmp_path / "g.json"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        train(job(topology=str(file)))
    with pytest.raises(InputError, match=words):
        make_sweep(make_job(job(topology=str(file), workers=6)), ["seed=0,1"], replicas=3)
    file.write_text("graphs: [{reduce: [[1, 0], [2, 0]]}]")
    make_sweep(make_job(job(topology=str(file), workers=6)), ["seed=0,1"], replicas=3)


def test_the_graphs_of_a_file_travel_with_the_settings(tmp_path: Path):
    file = tmp_path / "g.yaml"
    file.write_text("graphs:\n- reduce: [[1, 0], [2, 1]]\n  broadcast: [[0, 1], [0, 2]]\n")
    spec = make_job(job(topology=str(file))).settings().topology
    assert spec.graphs == ({"reduce": [[1, 0], [2, 1]], "broadcast": [[0, 1], [0, 2]]},)
