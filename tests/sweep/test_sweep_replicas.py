"""Arrays that several workers train together: each trial is what one worker makes of whole batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from plait.core import events
from plait.core.errors import InputError
from plait.data.loader import Batch
from plait.data.sampler import Position
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    VerifySettings,
)
from plait.schema.topology_spec import TopologySpec
from plait.sweeping.array_workers import check_worker_groups
from plait.sweeping.datasets import DataSets
from plait.sweeping.search.values import check
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from plait.sweeping.trials.assigned_trials import make_entry
from plait.sync.allreduce import autotune
from plait.sync.allreduce.topology_reduce import OverTopology
from plait.training import checkpoint as checkpoints
from plait.training.engines.train_step import TrainStep
from plait.training.fused.fused_components import FusedComponents
from plait.training.fused.rounds import rounds_of
from support.further import but_further
from support.plans import unverified_plan
from support.sweeping import (
    SweepsWhenAsked,
    killed_sweep,
    same_table,
    stop_and_go_on,
    sweep_here,
    sweep_of,
    sweep_rank,
    sweeps_rank,
    trial_alone,
)
from support.training import largest_difference, train_rank, unverified_job
from support.world import run_ranks

SGD, ADAM = OptimizerSettings("sgd", {"lr": 0.01}), OptimizerSettings("adamw", {"lr": 0.01})
JOB = unverified_job(
    steps=12, evaluate=EvaluateSettings(every_steps=6), checkpoint=CheckpointSettings(every_steps=5)
)
NORM = unverified_job(steps=10, model=ModelSettings("support.sweeping:norm_net"))
DROP = replace(
    JOB,
    model=ModelSettings("support.training:small_net", {"dropout": 0.4}),
    # The shares of two workers are cut into two microbatches and three.
    data=DataSettings("digits", 5),
    accumulate=3,
)

# What two workers and one come to alike.
EQUAL = {
    "microbatches": sweep_of(
        "steps=4,20", "data.batch_size=5,64",
        job=unverified_job(accumulate=3, optimizer=ADAM, clip_norm=0.3), width=3,
    ),
    "one by one": sweep_of("optimizer.kind=adamax,sgd", job=unverified_job(steps=10, optimizer=SGD)),
    "asha": sweep_of("optimizer.lr=log:1e-3:0.3", width=3, job=JOB, kind="asha", trials=6),
    # Where a trial has no gradient of a layer, weight decay and momentum must leave it alone.
    "unused": sweep_of(
        "model_args.uses=0.0,0.2,0.9", width=3,
        job=unverified_job(
            steps=6,
            model=ModelSettings("support.odd_models:SometimesUsed"),
            optimizer=OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
            verify=VerifySettings(),  # which finds that its trials cannot be fused
        ),
    ),
    "halving": sweep_of("optimizer.lr=log:1e-3:0.3", width=3, job=JOB, kind="halving", trials=6, eta=2),
    "pbt": sweep_of("optimizer.lr=log:1e-3:0.3", width=3, job=JOB, kind="pbt", trials=5, least_steps=4),
}  # fmt: skip
OTHERS = {
    "norms": sweep_of("optimizer.lr=0.01,0.1", job=NORM),
    "a norm": sweep_of("optimizer.lr=0.1", job=NORM, width=1),
    "fp16": sweep_of("optimizer.lr=0.01,0.1", job=unverified_job(precision="fp16", steps=12, optimizer=SGD)),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the sweeps above by groups of two, and what they came to."""
    folder = tmp_path_factory.mktemp("pair")
    sweeps = {name: replace(one, replicas=2) for name, one in {**EQUAL, **OTHERS}.items()}
    return folder, SweepsWhenAsked(2, sweeps, folder)


def best_weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = checkpoints.list_checkpoints(RunDir(folder).checkpoints)
    return checkpoints.load(path).model


def check_equal(settings: SweepSettings, found: dict[str, Any], folder: Path, own: Path) -> None:
    """A sweep in `folder` came to what one worker makes of it, and the best trial to what it makes alone."""
    assert same_table(sweep_here(settings, own / "one"), found, tolerance=1e-10)
    if settings.search.kind != "pbt":
        _, weights = trial_alone(settings, found["best"]["values"], own / "alone")
        assert largest_difference(best_weights(folder), weights) < 1e-10


# Like halving, asha leaves trials behind; pbt and trials one by one are in test_sweep_stages.py.
@pytest.mark.parametrize("name", but_further(EQUAL, "asha", "halving", "pbt", "one by one"))
def test_a_trial_of_two_workers_equals_that_of_one(
    name: str, pair: tuple[Path, dict[str, Any]], tmp_path: Path
):
    folder, found = pair
    assert (found[name]["workers"], found[name]["replicas"]) == (2, 2)
    check_equal(EQUAL[name], found[name], folder / name, tmp_path)


# An empty share is in test_sweep_averaging.py, too, and in a run in training/test_exact.py.
@pytest.mark.extended
def test_shares_may_differ_and_one_may_be_empty(tmp_path: Path):
    # The 1,442 samples of an epoch leave one for the last batch of 131, and two of three workers none.
    job = unverified_job(steps=None, epochs=1, data=DataSettings("digits", 131))
    settings = sweep_of("data.batch_size=131,200", "optimizer.lr=0.02,0.1", job=job)
    found = run_ranks(3, sweep_rank, replace(settings, replicas=3), tmp_path / "three")[0]
    check_equal(settings, found, tmp_path / "three", tmp_path)


@pytest.mark.parametrize("name", but_further(("norms", "a norm"), "a norm"))
def test_batch_norms_take_the_statistics_of_a_share_as_data_parallel_training_does(
    name: str, pair: tuple[Path, dict[str, Any]], tmp_path: Path
):
    folder, found = pair
    best = found[name]["best"]
    own = with_values(NORM, best["values"])
    parallel, weights = run_ranks(2, train_rank, own, tmp_path / "parallel")[0]
    assert best["metrics"] == pytest.approx(parallel.test, abs=1e-10)
    assert largest_difference(best_weights(folder / name), weights) < 1e-10


# One worker, and stages, have it in test_sweep.py and test_sweep_stages.py.
@pytest.mark.extended
def test_half_precision_on_two_workers_comes_close_to_that_on_one(
    pair: tuple[Path, dict[str, Any]], tmp_path: Path
):
    one = sweep_here(OTHERS["fp16"], tmp_path)
    assert same_table(one, pair[1]["fp16"], tolerance=0.02)


# As a sweep in stages (test_sweep_stages.py).
@pytest.mark.extended
def test_a_killed_group_goes_on_with_nothing_lost_and_the_same_dropout(tmp_path: Path):
    settings = replace(sweep_of("optimizer.lr=0.01,0.1", job=DROP), replicas=2)
    whole = run_ranks(2, sweep_rank, settings, tmp_path / "whole")[0]
    folder = killed_sweep(2, settings, tmp_path, 0)
    again = run_ranks(2, sweep_rank, settings, folder, resume=True)[0]
    assert same_table(whole, again, tolerance=1e-10)


def test_workers_of_a_group_draw_other_random_numbers_and_the_first_those_of_a_lone_worker():
    entries = [
        make_entry(unverified_job(seed=seed), None, torch.device("cpu"), DataSets()) for seed in (0, 1)
    ]
    alone = FusedComponents(entries).fused.seeds.tolist()
    first, second = (FusedComponents(entries, place).fused.seeds.tolist() for place in (0, 1))
    assert first == alone
    assert not set(second) & set(alone)


# One group that is stopped goes on in tests/test_engines.py; two share the trials in test_sweep_averaging.py.
@pytest.mark.extended
def test_two_groups_of_two_stop_together_and_go_on_as_one_worker(tmp_path: Path):
    settings = sweep_of("optimizer.lr=log:1e-3:0.3:3", "seed=0,1", width=2, job=JOB)
    expected = sweep_here(settings, tmp_path / "one")
    groups = replace(settings, replicas=2)
    stopped, saved, found = run_ranks(4, stop_and_go_on, groups, tmp_path / "four")[0]
    assert stopped["reason"] == "stopped"
    # The first trial was saved after its fifth step, and its group looked before the next.
    assert saved[0] == "step-000000005"
    assert same_table(expected, found)


def test_a_trial_without_rows_is_untouched_by_a_neighbour_whose_samples_are_not_finite():
    job = unverified_job(accumulate=3, optimizer=SGD)
    entry = lambda: make_entry(job, None, torch.device("cpu"), DataSets())  # noqa: E731
    own = (torch.ones(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    others = (torch.full((6, 1, 8, 8), torch.nan), torch.zeros(6, dtype=torch.long))
    few, many = Batch(own, 2, 2, 0, Position()), Batch(others, 6, 6, 0, Position())
    alone, beside = FusedComponents([entry()]), FusedComponents([entry(), entry()])
    losses, _ = TrainStep(beside, job).step([few, many], [1.0, 1.0])
    assert losses[0] == pytest.approx(TrainStep(alone, job).step([few], [1.0])[0].item())
    assert largest_difference(beside.state(0).model, alone.state(0).model) < 1e-10
    # A share may be empty.
    (pieces, weights), *_ = rounds_of([Batch(None, 0, 2, 0, Position()), many], [3, 3])
    assert weights[0] == 0.0
    assert pieces[0][0][0].isfinite().all()


def a_chain(hosts: list[str]) -> list[dict[str, Any]]:
    return [{"reduce": [[rank, rank - 1] for rank in range(1, len(hosts))]}]


def sweep_over_each(rank: int, sweeps: dict[str, SweepSettings], folder: Path) -> Any:
    """What sweeps came to, the topologies that they summed over, and how often one was measured."""
    names, measured = [], []
    switch, choose = OverTopology.switch, autotune.choose

    def switched(self: Any, topology: Any) -> None:
        names.append(topology.name)
        switch(self, topology)

    def chosen(*arguments: Any) -> Any:
        measured.append(arguments)
        return choose(*arguments)

    with mock.patch.object(OverTopology, "switch", switched), mock.patch.object(autotune, "choose", chosen):
        found = sweeps_rank(rank, {name: sweep for name, sweep in sweeps.items() if name != "auto"}, folder)
        *_, found["auto"] = stop_and_go_on(rank, sweeps["auto"], folder / "auto")
        return found, set(names), len(measured)


FOUR = ("optimizer.lr=0.01,0.03", "seed=0,1")
SAVED: dict[str, Any] = {"steps": 6, "optimizer": ADAM, "checkpoint": CheckpointSettings(every_steps=3)}


def of_whole_models() -> SweepSettings:
    return replace(sweep_of(*FOUR, width=2, job=unverified_job(**SAVED)), replicas=3)


def in_replicated_stages() -> SweepSettings:
    """The first of two stages has two workers."""
    return sweep_of(*FOUR, width=2, job=unverified_plan((2, 1), Schedule.FLUSH, **SAVED))


@pytest.mark.parametrize(
    ("make", "topologies"),
    [
        # Whole models have a ring in test_sweep_elastic_groups.py.
        (of_whole_models, ("test_sweep_replicas:a_chain",)),
        # Replicas of stages sum over topologies in a run in training/test_pipeline_training.py.
        pytest.param(in_replicated_stages, ("ring",), marks=pytest.mark.extended),
    ],
    ids=["whole models", "stages"],
)
def test_the_gradients_of_an_array_travel_over_the_topology_that_was_asked_for(
    make: Callable[[], SweepSettings], topologies: tuple[str, ...], tmp_path: Path
):
    one = make()
    sweeps = {
        name: replace(one, train=replace(one.train, topology=TopologySpec(name)))
        for name in ("native", *topologies, "auto")
    }
    found, names, measured = run_ranks(3, sweep_over_each, sweeps, tmp_path)[0]
    assert names >= set(topologies)
    # Two arrays of its trials follow each other on the same workers, and the sweep is resumed.
    assert measured == 1
    record = [recorded.event for recorded in events.read(tmp_path / "auto" / "events" / "rank0.jsonl")]
    assert len([event for event in record if isinstance(event, autotune.TopologyChosen)]) == 1
    for name in sweeps:
        assert same_table(found["native"], found[name], tolerance=1e-12)
        weights = best_weights(tmp_path / "native")
        assert largest_difference(best_weights(tmp_path / name), weights) < 1e-12


def test_replicas_that_cannot_be_are_refused_with_the_numbers():
    over = sweep_of("data.batch_size=4,64")
    with pytest.raises(InputError, match=r"--replicas: found 8, but a batch has 4 samples.*at most 4"):
        check(replace(over, replicas=8))
    with pytest.raises(InputError, match="--replicas: found 0, expected 1 or more"):
        check(replace(over, replicas=0))
    # The job may have more workers than train an array.
    root = replace(over, train=replace(over.train, topology=TopologySpec("star:2")), replicas=2)
    with pytest.raises(InputError, match=r"parallel.topology: found 'star:2', expected a root from 0 to 1"):
        check(root)
    with pytest.raises(InputError, match=r"found 2, which does not divide the 5 workers; use -np 4"):
        check_worker_groups(replace(over, replicas=2), 5)
    with pytest.raises(InputError, match=r"found 2, which does not divide the 1 worker; use -np 2"):
        check_worker_groups(replace(over, replicas=2), 1)
