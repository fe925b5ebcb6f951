"""Arrays whose workers average weights: each trial is what these workers make of it in a run of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from plait.comm.collectives import broadcast_value
from plait.core import events, run_events
from plait.core.errors import JobError
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    UNVERIFIED,
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    SyncSettings,
    TrainSettings,
    VerifySettings,
)
from plait.sweeping.array_builder import ArrayBuilder
from plait.sweeping.search.values import check
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from plait.sweeping.trials.trial_files import failure_file
from plait.training.engine import IntervalResult
from plait.training.engines import choose_pipeline_sync
from plait.training.engines.averaging_member import WholeModelMember
from plait.training.engines.decentralized import DecentralizedEngine
from plait.training.engines.pipeline_member import PipelineMember
from plait.training.engines.train_step import TrainStep
from support.averaging import job_store
from support.coordinating import make_coordinator
from support.further import but_further
from support.plans import in_stages, straight_layout
from support.sweeping import same_table, stop_and_go_on, sweep_here, sweep_of, sweep_rank
from support.training import digits_job, largest_difference, saved_weights, train_rank
from support.world import run_ranks

ADAM = OptimizerSettings("adamw", {"lr": 0.01})
# Workers synchronize when something is due, so what is due must be due at the same steps.
EVERY = 3
NORM = ModelSettings("support.sweeping:norm_net")
DROP = ModelSettings("support.training:small_net", {"dropout": 0.4})


def averaged(sync: str, options: dict[str, Any] | None = None, **changes: Any) -> TrainSettings:
    values = {
        "steps": 7,
        "sync": SyncSettings(sync, options or {}),
        "evaluate": EvaluateSettings(every_steps=EVERY),
        "log_every_steps": None,
        "verify": UNVERIFIED,
        **changes,
    }
    return digits_job(**values)


def side_by_side(sync: str, options: dict[str, Any] | None = None, **changes: Any) -> TrainSettings:
    """The same in two pipelines of two stages, each of which cuts its share into two microbatches."""
    layout = straight_layout((2, 2))
    return in_stages(averaged(sync, options, **changes), layout, Schedule.FLUSH, microbatches=4)


LOCAL = {"every": 3}
# Under these syncs all workers take the same steps, so a run has one outcome.
EQUAL = {
    "local SGD": sweep_of("optimizer.lr=0.01,0.1", job=averaged("local-sgd", LOCAL, optimizer=ADAM)),
    "DiLoCo": sweep_of(
        "optimizer.lr=0.01,0.03", job=averaged("local-sgd", {"every": 2, "outer": "nesterov"})
    ),
    # A trial keeps the outer momentum when others join and leave.
    "trials that join": sweep_of(
        "optimizer.lr=0.01,0.03",
        "steps=3,9",
        job=averaged("local-sgd", {"every": 2, "outer": "nesterov"}),
        width=2,
    ),
    "SMA": sweep_of("optimizer.lr=0.01,0.1", job=averaged("sma", clip_norm=0.3, accumulate=2)),
    "pairs": sweep_of("optimizer.lr=0.01,0.1", job=averaged("pair-sync", {"state": True}, optimizer=ADAM)),
    # One worker has none of the last of 1,442 samples in batches of 1,441, and its trial skips the step.
    "an empty share": sweep_of(
        "data.batch_size=1441,600", job=averaged("local-sgd", LOCAL, optimizer=ADAM, steps=4)
    ),
    "batch norms": sweep_of("optimizer.lr=0.01,0.1", job=averaged("local-sgd", LOCAL, model=NORM)),
    # States that are no weight's shape: a number, and factors of a matrix.
    "factored states": sweep_of(
        "optimizer.kind=nadam,adafactor",
        "optimizer.lr=0.01,0.1",
        job=averaged("local-sgd", LOCAL, optimizer=ADAM),
    ),
    # Where a trial has no gradient of a layer, weight decay and momentum must leave it alone.
    "unused layers": sweep_of(
        "model_args.uses=0.0,0.2,0.9",
        job=averaged(
            "local-sgd",
            LOCAL,
            model=ModelSettings("support.odd_models:SometimesUsed"),
            optimizer=OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
            verify=VerifySettings(),
        ),
    ),
    "one by one": sweep_of("optimizer.lr=0.01,0.1", job=averaged("local-sgd", LOCAL), width=1),
    "unlike seeds": sweep_of("seed=0,1,2", job=averaged("local-sgd", LOCAL, optimizer=ADAM)),
}


# In pipelines side by side. Made when they are needed: they trace their models.
IN_STAGES = {
    "trials that join": lambda: sweep_of(
        "steps=3,7,4", job=side_by_side("local-sgd", {"every": 2, "outer": "nesterov"}), width=2
    ),
    "an empty share": lambda: sweep_of(
        "data.batch_size=1441,600", job=side_by_side("local-sgd", LOCAL, optimizer=ADAM, steps=4)
    ),
    # One pipeline has no sample of any trial in the last step of an epoch.
    "no samples": lambda: sweep_of(
        "seed=0,1", job=side_by_side("local-sgd", LOCAL, steps=4, data=DataSettings("digits", 1441))
    ),
    # Of the last 6 samples of an epoch each pipeline has 3, in one microbatch, as in a run: none has one.
    "small shares": lambda: sweep_of(
        "optimizer.lr=0.01,0.1",
        job=side_by_side("pair-sync", model=NORM, steps=6, data=DataSettings("digits", 359)),
    ),
    "batch norms": lambda: sweep_of(
        "optimizer.lr=0.01,0.1", "data.batch_size=60,64", job=side_by_side("pair-sync", model=NORM)
    ),
    # Not fused, it draws as a run does.
    "one by one": lambda: sweep_of(
        "optimizer.lr=0.01,0.1", job=side_by_side("sma", model=DROP, steps=6), width=1
    ),
}


def sweep_and_trials(rank: int, sweep: SweepSettings, folder: Path, address: str) -> list[Any]:
    """A sweep by one group of all workers; and each of its trials as a run of these workers."""
    settings = sweep if sweep.train.in_stages else replace(sweep, replicas=dist.get_world_size())
    result = sweep_rank(rank, settings, folder / "sweep")
    alone = []
    for row in broadcast_value(result.get("trials"), 0):
        own = with_values(sweep.train, row["values"])
        run, _ = train_rank(rank, own, folder / f"trial{row['trial']}", address=address)
        dist.barrier()
        alone.append(run.test)
    return [result, alone]


# "an empty share" has the same local SGD, "trials that join" the same outer optimizer; layers that some
# trials do not use are in test_sweep_replicas.py, too, trials one by one in test_sweep_stages.py. Runs have
# pairs in tests/training/test_elastic_averaging.py, SMA in test_sync_resume.py, statistics in
# tests/sync/test_buffers.py.
@pytest.mark.parametrize(
    "name",
    but_further(
        EQUAL,
        *("local SGD", "DiLoCo", "unused layers", "pairs", "one by one", "factored states", "unlike seeds"),
        *("SMA", "batch norms", "an empty share"),
    ),
)
def test_a_trial_equals_the_run_of_the_same_workers_under_the_same_sync(name: str, tmp_path: Path) -> None:
    check_as_runs(2, EQUAL[name], tmp_path)


# tests/test_engines.py has a sweep in pipelines side by side; whole models are above.
@pytest.mark.extended
@pytest.mark.parametrize("name", IN_STAGES)
def test_a_trial_in_stages_equals_the_run_in_the_same_pipelines_side_by_side(
    name: str, tmp_path: Path
) -> None:
    check_as_runs(4, IN_STAGES[name](), tmp_path)


def check_as_runs(workers: int, sweep: SweepSettings, tmp_path: Path) -> None:
    with job_store() as address:
        result, alone = run_ranks(workers, sweep_and_trials, sweep, tmp_path, address)[0]
    assert result["reason"] == "finished"
    for row, test in zip(result["trials"], alone):
        assert row["metrics"] == pytest.approx(test, abs=1e-10)
    best = saved_weights(tmp_path / "sweep")
    assert largest_difference(best, saved_weights(tmp_path / f"trial{result['best']['trial']}")) < 1e-10


# Under these, who takes which share depends on the time.
OWN_PACE = {
    "partial reduce": ("partial-reduce", {}),
    "partial reduce of gradients": ("partial-reduce", {"average": "gradients"}),
    "AD-PSGD": ("ad-psgd", {}),
    "pair averaging": ("pair-averaging", {}),
    "HetPipe": ("hetpipe", {"staleness": 1, "wave": 2}),
}


def watched_sweep(rank: int, settings: SweepSettings, folder: Path) -> tuple[Any, list[Any], list[int]]:
    """A sweep, the weights of this worker's trials after each interval, and the samples that it took."""
    intervals: list[Any] = []
    samples = [0] * 8
    member_kind = PipelineMember if settings.train.in_stages else WholeModelMember
    train, update = DecentralizedEngine.train, member_kind.update

    def watched_train(engine: DecentralizedEngine, steps: int) -> IntervalResult:
        result = train(engine, steps)
        states = [engine.components.state(slot).model for slot in range(len(engine.trials))]
        sums = [{name: tensor.double().sum().item() for name, tensor in state.items()} for state in states]
        intervals.append((result.steps, sums))
        return result

    def watched_update(member: Any, steps: Any, share: int, batches: Any, factors: Any) -> Any:
        for trial, batch in zip(member._trials, batches):
            samples[trial.number] += batch.count
        return update(member, steps, share, batches, factors)

    with (
        mock.patch.object(DecentralizedEngine, "train", watched_train),
        mock.patch.object(member_kind, "update", watched_update),
    ):
        return sweep_rank(rank, settings, folder), intervals, samples


# The first is the second without gradients; that pairs average is in tests/training/test_syncs.py.
@pytest.mark.parametrize(
    "name", but_further(OWN_PACE, "partial reduce", "AD-PSGD", "pair averaging", "HetPipe")
)
def test_at_their_own_pace_workers_come_to_the_same_weights_and_use_each_sample_once(
    name: str, tmp_path: Path
) -> None:
    job = averaged(*OWN_PACE[name], optimizer=ADAM)
    # Four trials in two slots: they join and leave.
    sweep = sweep_of("data.batch_size=30,40", "steps=6,16", width=2, job=job)
    check_own_pace(*run_ranks(2, watched_sweep, replace(sweep, replicas=2), tmp_path))


# Each worker of a pipeline averages by itself, as in a run (training/test_pipelines_side_by_side.py).
@pytest.mark.extended
@pytest.mark.parametrize("name", OWN_PACE)
def test_at_their_own_pace_so_do_the_stages_of_pipelines_side_by_side(name: str, tmp_path: Path) -> None:
    job = side_by_side(*OWN_PACE[name], optimizer=ADAM)
    sweep = sweep_of("data.batch_size=30,40", "steps=6,16", width=2, job=job)
    first, second, *last = run_ranks(4, watched_sweep, sweep, tmp_path)
    check_own_pace(first, second)
    # The workers of the second stage.
    (_, intervals, *_), (_, others, *_) = last
    assert intervals == others != first[1]


def check_own_pace(one: tuple[Any, list[Any], list[int]], other: tuple[Any, list[Any], list[int]]) -> None:
    """Check a sweep of two members, by what their first workers saw."""
    (result, intervals, first), (_, others, second) = one, other
    assert intervals == others
    sizes = [trial["values"]["data.batch_size"] * trial["values"]["steps"] for trial in by_number(result)]
    assert [one + other for one, other in zip(first, second)][:4] == sizes
    assert [trial["state"] for trial in by_number(result)] == ["finished"] * 4
    # A guess has a loss of 2.3.
    assert all(trial["metrics"]["loss"] < 2.0 for trial in result["trials"])
    assert all(0.0 < trial["train_loss"] < 2.0 for trial in result["trials"])


def by_number(result: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(result["trials"], key=lambda trial: trial["trial"])


OUTER = {
    "options": {"every": 2, "outer": "nesterov"},
    "checkpoint": CheckpointSettings(every_steps=EVERY),
    "model": DROP,
}


def test_a_resumed_sweep_has_the_momentum_of_the_outer_optimizer(tmp_path: Path) -> None:
    settings = replace(sweep_of("optimizer.lr=0.01,0.03", job=averaged("local-sgd", **OUTER)), replicas=2)
    whole, (stopped, saved, resumed) = run_ranks(2, whole_and_resumed, settings, tmp_path)[0]
    assert (stopped["reason"], saved[0]) == ("stopped", f"step-{EVERY:09d}")
    assert {(trial["state"], trial["step"]) for trial in stopped["trials"]} == {("waiting", EVERY)}
    assert same_table(whole, resumed, tolerance=1e-12)


# Stopped in stages, one without such an optimizer goes on in tests/test_engines.py.
@pytest.mark.extended
def test_resumed_in_stages_it_has_it_too_and_draws_as_whole_models_do(tmp_path: Path) -> None:
    job = averaged("local-sgd", **OUTER, accumulate=2)
    whole = replace(sweep_of("optimizer.lr=0.01,0.03", job=job), replicas=2)
    expected = run_ranks(2, sweep_rank, whole, tmp_path / "whole")[0]
    settings = replace(whole, train=side_by_side("local-sgd", **OUTER), replicas=1)
    stopped, _, resumed = run_ranks(4, stop_and_go_on, settings, tmp_path / "stages")[0]
    assert stopped["reason"] == "stopped"
    assert same_table(expected, resumed, tolerance=1e-10)


def whole_and_resumed(rank: int, settings: SweepSettings, folder: Path) -> tuple[Any, Any]:
    whole = sweep_rank(rank, settings, folder / "whole")
    return whole, stop_and_go_on(rank, settings, folder / "cut")


def engines_by_speed(
    rank: int, settings: SweepSettings, folder: Path, step_s: tuple[float, float]
) -> set[str]:
    """The engines of a sweep whose sync is measured, where a step of each worker or pipeline takes `step_s`.

    It is stopped, and goes on where steps take other times.
    """
    engines, times, make_engine = set[str](), step_s, ArrayBuilder.make

    def make(builder: ArrayBuilder, *given: Any) -> Any:
        engine = make_engine(builder, *given)
        engines.add(type(engine).__name__)
        return engine

    def seconds(*_: Any) -> float:
        # Only the times of a pipeline's first worker count.
        return times[rank] if rank < len(times) else 9.0

    with (
        mock.patch.object(TrainStep, "time_backward", seconds),
        mock.patch.object(choose_pipeline_sync, "time_update", seconds),
        mock.patch.object(ArrayBuilder, "make", make),
    ):
        saved = folder / "trials" / "0000" / "checkpoints"
        assert sweep_rank(rank, settings, folder, stop_file=saved).get("reason") in (None, "stopped")
        times = (0.1, 0.1) if step_s[0] != step_s[1] else (0.1, 0.4)
        assert sweep_rank(rank, settings, folder, resume=True).get("reason") in (None, "finished")
    return engines


SAVED = CheckpointSettings(every_steps=EVERY)


@pytest.mark.parametrize(
    ("workers", "step_s", "sync", "engine"),
    [
        pytest.param(2, (0.1, 0.1), "all-reduce", "WholeModelEngine", marks=pytest.mark.extended),
        (2, (0.1, 0.4), "partial-reduce", "DecentralizedEngine"),
        # Pipelines are measured in tests/training/test_decentralized.py.
        pytest.param(4, (0.1, 0.1), "all-reduce", "PipelineEngine", marks=pytest.mark.extended),
        pytest.param(4, (0.1, 0.4), "partial-reduce", "DecentralizedEngine", marks=pytest.mark.extended),
    ],
)
def test_auto_measures_the_workers_of_a_sweep_which_keeps_to_what_was_chosen(
    workers: int, step_s: tuple[float, float], sync: str, engine: str, tmp_path: Path
) -> None:
    job = averaged("auto", checkpoint=SAVED) if workers == 2 else side_by_side("auto", checkpoint=SAVED)
    sweep = replace(sweep_of("optimizer.lr=0.01,0.1", job=job), replicas=2 if workers == 2 else 1)
    assert run_ranks(workers, engines_by_speed, sweep, tmp_path, step_s) == [{engine}] * workers
    found = [recorded.event for recorded in events.read(RunDir(tmp_path).events())]
    assert [event.sync for event in found if isinstance(event, run_events.SyncChosen)] == [sync]


def test_the_groups_of_an_elastic_sweep_take_one_sync_which_is_not_measured(tmp_path: Path) -> None:
    sweep = replace(sweep_of("optimizer.lr=0.01,0.1", job=averaged("auto")), replicas=2)
    question = {"ask": "sync", "chosen": None}
    elastic = make_coordinator(sweep, tmp_path, (0, 1), elastic=True)
    assert [elastic.answer(question)["sync"] for _ in range(2)] == ["all-reduce"] * 2
    # It goes on with it on fixed workers, too.
    assert make_coordinator(sweep, tmp_path, (0, 1), resume=True).answer(question)["sync"] == "all-reduce"
    found = [recorded.event for recorded in events.read(RunDir(tmp_path).events())]
    assert [type(event) for event in found] == [run_events.SyncChosen]


def sweep_by_choice(rank: int, settings: SweepSettings, folder: Path, sync: str) -> list[Any]:
    """What a sweep comes to where `sync` is measured to be the best, and where it is named."""
    named = replace(settings, train=replace(settings.train, sync=SyncSettings(sync)))
    with mock.patch.object(choose_pipeline_sync, "choose", return_value=run_events.SyncChosen(sync, "")):
        chosen = sweep_rank(rank, settings, folder / "chosen")
    return [chosen, sweep_rank(rank, named, folder / "named")]


# Of the syncs that average, one under which a sweep has one outcome.
# The choice is made once for a sweep, above; each of the two syncs is a row of tests/test_engines.py.
@pytest.mark.extended
@pytest.mark.parametrize("sync", ["all-reduce", "pair-sync"])
def test_a_sweep_in_stages_comes_to_what_it_does_under_the_sync_that_was_chosen(
    sync: str, tmp_path: Path
) -> None:
    # Measuring updates batch norms, too, of models that are dropped.
    sweep = sweep_of("optimizer.lr=0.01,0.1", job=side_by_side("auto", model=NORM, steps=4))
    chosen, named = run_ranks(4, sweep_by_choice, sweep, tmp_path, sync)[0]
    assert same_table(named, chosen, tolerance=1e-12)
    weights = [saved_weights(tmp_path / name) for name in ("chosen", "named")]
    assert largest_difference(*weights) < 1e-12


def test_two_groups_average_apart_from_each_other(tmp_path: Path) -> None:
    # The mean of two steps is the step by the mean gradient, for an optimizer without memory.
    sgd = OptimizerSettings("sgd", {"lr": 0.01})
    job = averaged("local-sgd", {"every": 1}, optimizer=sgd, log_every_steps=EVERY)
    settings = sweep_of("optimizer.lr=log:1e-3:0.3:3", width=1, job=job)
    found = run_ranks(4, sweep_rank, replace(settings, replicas=2), tmp_path / "four")[0]
    assert same_table(sweep_here(settings, tmp_path / "one"), found)


def test_a_sync_that_replicas_cannot_have_is_refused_with_the_key() -> None:
    def swept(sync: str, options: dict[str, Any]) -> SweepSettings:
        return replace(sweep_of("optimizer.lr=0.01,0.1", job=averaged(sync, options)), replicas=2)

    with pytest.raises(JobError, match=r"sync_options.minimum: found 3, expected 2, of 2 workers"):
        check(swept("partial-reduce", {"minimum": 3}))
    with pytest.raises(JobError, match=r"sync_options.servers: found 2, expected 1, of 2 workers"):
        check(swept("hetpipe", {"servers": 2, "dedicated": True}))
    # In stages, options count pipelines: here there are two times two.
    four = replace(sweep_of("seed=0,1", job=side_by_side("partial-reduce", {"minimum": 3})), replicas=2)
    check(four)
    with pytest.raises(JobError, match=r"sync_options.minimum: found 3, expected 2, of 2 pipelines"):
        check(replace(four, replicas=1))


def sweep_that_fails(rank: int, settings: SweepSettings, folder: Path) -> str:
    """The error of a sweep in which the second worker fails at its first update."""
    update, failed = WholeModelMember.update, list[WholeModelMember]()

    def failing(member: WholeModelMember, *given: Any) -> Any:
        if rank == 1:
            failed.append(member)
            raise ValueError("an odd sample")
        return update(member, *given)

    with mock.patch.object(WholeModelMember, "update", failing), pytest.raises(Exception) as failure:
        sweep_rank(rank, settings, folder)
    for member in failed:
        member.close()  # as its process does when it ends, which is later here
    return str(failure.value)


def test_a_trial_that_fails_on_one_worker_is_recorded_though_the_others_are_at_other_steps(
    tmp_path: Path,
) -> None:
    sweep = sweep_of("optimizer.lr=0.01,0.1", job=averaged("partial-reduce"), width=1)
    lost, failed = run_ranks(2, sweep_that_fails, replace(sweep, replicas=2), tmp_path)
    assert failed == "an odd sample"
    assert re.search("worker 1 is (lost|gone)", lost)
    found = [recorded.event for recorded in events.read(RunDir(tmp_path).events())]
    ended = [event for event in found if isinstance(event, run_events.TrialEnded)]
    assert ended[-1].state == "failed"
    assert "an odd sample" in failure_file(RunDir(tmp_path), ended[-1].trial).read_text()
