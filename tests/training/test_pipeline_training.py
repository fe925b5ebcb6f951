"""Pipelined runs: the trainer's steps, checkpoints, evaluations, events and stops, under any plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import JobError
from plait.core.events import read
from plait.core.run_events import Messages, Operations
from plait.core.run_events import Step as StepEvent
from plait.data.sampler import GlobalBatch, Position
from plait.launcher.run_dir import RunDir
from plait.pipeline.layout import stream
from plait.pipeline.microbatches import Microbatch, MicrobatchSource, cut_step
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.operations import Update
from plait.planner.schedules.orders import operations
from plait.schema.plans.plan import Layout
from plait.schema.settings import (
    UNVERIFIED,
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    TrainSettings,
    VerifySettings,
)
from plait.schema.topology_spec import TopologySpec
from plait.training import checkpoint
from plait.training.checks.plan_settings import check_pipeline
from support.further import but_further
from support.plans import placed, unverified_plan
from support.training import (
    PlainWorker,
    largest_difference,
    saved_weights,
    train_here,
    train_rank,
    train_with,
    unverified_job,
)
from support.world import run_ranks


def test_steps_whose_loss_is_read_later_have_the_times_they_took(tmp_path: Path) -> None:
    """The last steps before a checkpoint are read together, and must not seem to take no time."""
    settings = unverified_plan(
        (1, 1), Schedule.FLUSH, checkpoint=CheckpointSettings(every_steps=5), log_every_steps=1
    )
    run_ranks(2, train_rank, settings, tmp_path / "run")
    events = [entry.event for entry in read(RunDir(tmp_path / "run").events(0))]
    seconds = [event.seconds for event in events if isinstance(event, StepEvent)]
    assert len(seconds) == settings.steps
    assert min(seconds[4::5]) > 0.1 * sorted(seconds)[len(seconds) // 2]


def final_weights(folder: Path) -> dict[str, Any]:
    return checkpoint.load(checkpoint.list_checkpoints(folder / "checkpoints")[0]).model


# tests/test_engines.py has it with and without replicas, pipeline/test_pipeline_exact.py with all schedules.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("replicas", "schedule"),
    [
        pytest.param((1, 1), Schedule.FLUSH, marks=pytest.mark.extended),
        ((2, 1), Schedule.GPIPE),
        pytest.param((1, 2), Schedule.ZERO_BUBBLE, marks=pytest.mark.extended),
    ],
)
def test_a_pipelined_run_gives_the_weights_and_metrics_of_a_plain_one(
    tmp_path: Path, replicas: tuple[int, ...], schedule: Schedule
) -> None:
    result = run_ranks(sum(replicas), train_rank, unverified_plan(replicas, schedule), tmp_path / "pipeline")[
        0
    ][0]
    plain, weights = train_here(unverified_job(steps=20), tmp_path / "plain")
    assert largest_difference(final_weights(tmp_path / "pipeline"), weights) < 1e-10
    assert result.test["accuracy"] == plain.test["accuracy"]
    assert result.test["loss"] == pytest.approx(plain.test["loss"], rel=1e-9)
    assert result.train_loss == pytest.approx(plain.train_loss, rel=1e-9)


def test_a_checkpoint_has_whole_what_a_stage_knows_by_another_name(tmp_path: Path) -> None:
    """Batches of one microbatch, as batch normalisation goes by them."""
    model = ModelSettings("support.training:TwiceNamed")
    settings = unverified_plan((1, 1), Schedule.FLUSH, model=model, microbatches=1, steps=3)
    run_ranks(2, train_rank, settings, tmp_path / "pipeline")
    _, weights = train_here(unverified_job(model=model, steps=3), tmp_path / "plain")
    assert largest_difference(final_weights(tmp_path / "pipeline"), weights) < 1e-10


def test_a_run_goes_on_under_another_plan_and_without_one(tmp_path: Path) -> None:
    early = {"checkpoint": CheckpointSettings(every_steps=7)}
    folder = tmp_path / "run"
    optimizer = {}
    _, expected = train_here(unverified_job(steps=20, **optimizer), tmp_path / "plain")
    first = unverified_plan((1, 1), Schedule.FLUSH, **early)
    stop = tmp_path / "stop"
    stop.touch()
    stopped = run_ranks(2, train_rank, first, folder, stop_file=stop)[0][0]
    assert stopped.reason == "stopped"
    assert stopped.step < 20
    stop.unlink()
    second = unverified_plan((2, 1), Schedule.GPIPE, microbatches=5)
    assert run_ranks(3, train_rank, second, folder, True)[0][0].reason == "finished"
    assert largest_difference(final_weights(folder), expected) < 1e-10
    # And back into one process, from where the first plan had stopped.
    for path in checkpoint.list_checkpoints(folder / "checkpoints")[:1]:
        (path / "state.json").unlink()
    _, weights = train_here(unverified_job(steps=20), folder, resume=True)
    assert largest_difference(weights, expected) < 1e-10


@pytest.mark.parametrize(
    "schedule", [Schedule.STASH, pytest.param(Schedule.TWO_BUFFERED, marks=pytest.mark.extended)]
)
def test_an_asynchronous_run_drains_only_where_it_must_and_stops_when_asked(
    tmp_path: Path, schedule: Schedule
) -> None:
    # An audited step would be an interval of its own.
    rare = {"checkpoint": CheckpointSettings(every_steps=16), "verify": VerifySettings(audit="off")}
    settings = unverified_plan((2, 1), schedule, **rare)
    result = run_ranks(3, train_rank, settings, tmp_path / "whole")[0][0]
    assert result.reason == "finished"
    assert result.test["accuracy"] > 0.5
    for rank in range(3):
        found = [r.event for r in read(RunDir(tmp_path / "whole").events(rank))]
        intervals = [event for event in found if isinstance(event, Operations)]
        assert [event.step for event in intervals] == [16, 20]
        assert all(s <= e for event in intervals for s, e in zip(event.starts, event.ends))
        assert intervals[0].letters.count("F") == intervals[0].letters.count("B") == (64 if rank == 2 else 32)
    steps = [r.event for r in read(RunDir(tmp_path / "whole").events(0)) if isinstance(r.event, StepEvent)]
    assert [event.step for event in steps] == list(range(1, 21))
    stop = tmp_path / "stop"
    stop.touch()
    # Replicas on two hosts, of the last stage: they sum during backward, and know how a round ends before.
    apart = unverified_plan((1, 2), schedule, **rare)
    stopped = run_ranks(3, train_rank, apart, tmp_path / "run", stop_file=stop, hosts=["a", "a", "b"])[0][0]
    assert (stopped.reason, 0 < stopped.step < 16) == ("stopped", True)
    stop.unlink()
    resumed = run_ranks(3, train_rank, settings, tmp_path / "run", True)[0][0]
    assert (resumed.reason, resumed.step) == ("finished", 20)


@pytest.mark.parametrize("hosts", [None, ["a", "b"]], ids=["shared-memory", "tcp"])
def test_each_message_is_recorded_by_its_sender_and_its_receiver(
    tmp_path: Path, hosts: list[str] | None
) -> None:
    settings = unverified_plan((1, 1), Schedule.FLUSH, steps=2)
    run_ranks(2, train_rank, settings, tmp_path, hosts=hosts)
    found: dict[tuple[int, str, str], list[tuple[int, int, int, int]]] = {}
    for rank in range(2):
        for each in (r.event for r in read(RunDir(tmp_path).events(rank))):
            if isinstance(each, Messages):
                assert set(each.stages) == set(each.peers) ^ {0, 1} == {rank}
                assert all(start <= end for start, end in zip(each.starts, each.ends))
                for way, letter, *numbers in zip(
                    each.ways, each.letters, each.microbatches, each.peers, each.peer_stages, each.bytes
                ):
                    found.setdefault((rank, way, letter), []).append(tuple(numbers))
    forward, backward = found[0, "s", "F"], found[1, "s", "B"]
    assert [numbers[:3] for numbers in forward] == 2 * [(i, 1, 1) for i in range(4)]
    assert [numbers[:3] for numbers in backward] == 2 * [(i, 0, 0) for i in range(4)]
    # Inputs and targets of the batch and the gradients of 16 samples, in whole numbers of 64 bytes.
    assert [numbers[3] for numbers in forward] == [numbers[3] for numbers in found[1, "r", "F"]]
    assert [numbers[3] for numbers in backward] == [numbers[3] for numbers in found[0, "r", "B"]]
    assert set(found) == {(0, "s", "F"), (1, "r", "F"), (1, "s", "B"), (0, "r", "B")}


def _has_saved(folder: Path) -> Callable[[], bool]:
    return lambda: bool(checkpoint.list_checkpoints(RunDir(folder).checkpoints))


def test_an_asynchronous_run_that_is_killed_resumes_to_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    settings = unverified_plan((1, 1), Schedule.STASH, steps=40, checkpoint=CheckpointSettings(every_steps=8))
    run_ranks(2, train_rank, settings, tmp_path / "whole")
    # A busy machine may look too late: then the run begins anew.
    for attempt in range(5):
        folder = tmp_path / f"killed-{attempt}"
        if run_ranks(2, train_rank, settings, folder, kill_when=_has_saved(folder)) == [None, None]:
            break
    else:
        raise AssertionError("five times the run came to its end before it was killed")
    run_ranks(2, train_rank, settings, folder, True)
    assert largest_difference(saved_weights(folder), saved_weights(tmp_path / "whole")) == 0.0


# Such a run is above; that these workers agree on where it ends is below.
@pytest.mark.extended
def test_an_asynchronous_run_whose_workers_hold_several_stages_stops_when_asked_and_goes_on(
    tmp_path: Path,
) -> None:
    settings = placed(Layout(((0,), (1,), (0,))), Schedule.STASH, verify=UNVERIFIED)
    stop = tmp_path / "stop"
    stop.touch()
    stopped = run_ranks(2, train_rank, settings, tmp_path / "run", stop_file=stop)[0][0]
    assert (stopped.reason, 0 < stopped.step < 20) == ("stopped", True)
    stop.unlink()
    resumed = run_ranks(2, train_rank, settings, tmp_path / "run", True)[0][0]
    assert (resumed.reason, resumed.step) == ("finished", 20)
    assert resumed.test["accuracy"] > 0.5


def test_what_a_pipeline_cannot_do_is_refused_in_words() -> None:
    settings = unverified_plan((1, 1), Schedule.STASH)
    with pytest.raises(JobError, match="for 2 devices, but the job has 3 workers; use -np 2"):
        check_pipeline(settings, 3)
    with pytest.raises(JobError, match="precision: found 'fp16'.* schedule stash"):
        check_pipeline(unverified_plan((1, 1), Schedule.STASH, precision="fp16"), 2)
    with pytest.raises(JobError, match="parallel.recompute: found stage 9, expected stages 0 to 1"):
        check_pipeline(with_choices(unverified_plan((1, 1), Schedule.STASH), recompute=(9,)), 2)
    with pytest.raises(JobError, match="parallel.vertical_sync: found schedule flush"):
        check_pipeline(with_choices(unverified_plan((1, 1), Schedule.FLUSH), vertical_sync=True), 2)


@pytest.mark.parametrize(
    ("schedule", "replicas", "depths"),
    [
        (Schedule.GPIPE, (1, 1), {0: 1}),
        (Schedule.STASH, (2, 1), {0: 1, 1: 2}),
        (Schedule.STASH, (3, 1), {0: 1, 1: 3}),
        (Schedule.TWO_BUFFERED, (1, 1), {0: 1, 1: 5}),
        (Schedule.FLUSH, (1, 1), {0: 1, 1: 3}),
    ],
)
def test_depths_that_leave_workers_waiting_for_each_other_are_refused_before_the_start(
    schedule: Schedule, replicas: tuple[int, ...], depths: dict[int, int]
) -> None:
    with pytest.raises(JobError, match=r"parallel\.depths: .*wait"):
        check_pipeline(with_choices(unverified_plan(replicas, schedule), depths=depths), sum(replicas))


def with_choices(settings: TrainSettings, **choices: Any) -> TrainSettings:
    assert settings.pipeline is not None
    return replace(settings, pipeline=replace(settings.pipeline, **choices))


@pytest.mark.parametrize("schedule", but_further((Schedule.FLUSH, Schedule.STASH), Schedule.FLUSH))
def test_a_stop_is_obeyed_however_short_the_intervals_are(tmp_path: Path, schedule: Schedule) -> None:
    settings = unverified_plan((1, 1), schedule, checkpoint=CheckpointSettings(every_steps=1))
    stop = tmp_path / "stop"
    stop.touch()
    result = run_ranks(2, train_rank, settings, tmp_path / "run", stop_file=stop)[0][0]
    assert (result.reason, result.step) == ("stopped", 1)


def test_workers_of_other_hosts_that_meet_in_an_evaluation_only_end_cleanly(tmp_path: Path) -> None:
    """Resuming a finished run evaluates and ends: no gradient ever comes back."""
    settings = unverified_plan((1, 1), Schedule.FLUSH, steps=3)
    first = run_ranks(2, train_rank, settings, tmp_path / "run", hosts=["a", "b"])[0][0]
    again = run_ranks(2, train_rank, settings, tmp_path / "run", True, hosts=["a", "b"])[0][0]
    assert again.test == pytest.approx(first.test)


def train_in_own_folder(rank: int, settings: TrainSettings, folder: Path, resume: bool) -> dict[str, Any]:
    return train_rank(rank, settings, folder / f"host{rank}", resume, hosts=["a", "b"])[0]


def test_a_pipeline_on_hosts_without_a_shared_disk_goes_on_from_the_first_hosts_checkpoint(
    tmp_path: Path,
) -> None:
    """Only the first host has the checkpoint; the others receive its state."""
    first = unverified_plan((1, 1), Schedule.FLUSH, steps=3)
    run_ranks(2, train_in_own_folder, first, tmp_path, False)
    result = run_ranks(2, train_in_own_folder, replace(first, steps=6), tmp_path, True)[0]
    assert (result.reason, result.step) == ("finished", 6)
    _, expected = train_here(unverified_job(steps=6), tmp_path / "plain")
    assert largest_difference(final_weights(tmp_path / "host0"), expected) < 1e-10


@given(st.integers(1, 100), st.integers(1, 40), st.data())
def test_a_smaller_batch_keeps_the_size_of_its_microbatches(usual: int, pieces: int, data: Any) -> None:
    count = data.draw(st.integers(1, usual))
    batch = GlobalBatch(0, tuple(range(count)), Position())
    whole = GlobalBatch(0, tuple(range(usual)), Position())
    expected = [len(m.samples) for m in cut_step(0, whole, pieces, usual)]
    sizes = [len(m.samples) for m in cut_step(0, batch, pieces, usual)]
    assert len(expected) == min(pieces, usual)
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= max(*expected, 3)
    if min(expected) > 1:
        assert min(sizes) > 1 or count == 1


def test_the_last_batch_of_an_epoch_leaves_no_microbatch_of_one_sample_to_batch_normalisation(
    tmp_path: Path,
) -> None:
    """721 samples in batches of 142 leave 11, and 71 microbatches of two samples each are asked for."""
    model = ModelSettings("support.traced_models:NormedRows")
    data = DataSettings("support.training:half_of_digits", 142)
    settings = unverified_plan((1,), Schedule.FLUSH, 71, model=model, data=data, steps=None, epochs=1)
    result = run_ranks(1, train_rank, settings, tmp_path)[0][0]
    assert (result.reason, result.step) == ("finished", 6)


def train_both(rank: int, jobs: dict[str, TrainSettings], folder: Path) -> dict[str, dict[str, Any]]:
    """The results of jobs that stop after some steps and go on from their checkpoints."""
    for name, settings in jobs.items():
        train_rank(rank, replace(settings, steps=5), folder / name)
    return {name: train_rank(rank, own, folder / name, resume=True)[0] for name, own in jobs.items()}


def test_fp16_in_stages_leaves_out_the_updates_that_one_process_does(tmp_path: Path) -> None:
    """The first scales overflow: all stages back off alike, and a resumed run has the scale it had."""
    model = ModelSettings("plait.workloads.mlp:mlp", {"inputs": 64, "hidden": [32, 32]})
    half = {"precision": "fp16", "model": model, "loss": "support.training:large_loss", "steps": 12}
    # In a process like theirs: what fp16 rounds to may depend on what a process has done before.
    plain, _ = run_ranks(1, train_rank, unverified_job(**half, accumulate=4), tmp_path / "plain")[0]
    jobs = {"flush": unverified_plan((1, 1), Schedule.FLUSH, **half, clip_norm=1e3)}
    # Two runs in one world.
    results = run_ranks(2, train_both, jobs, tmp_path, deadline_s=240)[0]
    expected = checkpoint.load(checkpoint.list_checkpoints(tmp_path / "plain" / "checkpoints")[0])
    assert 1.0 < expected.progress["loss_scale"]["scale"] < 65536.0
    for name, result in results.items():
        found = checkpoint.load(checkpoint.list_checkpoints(tmp_path / name / "checkpoints")[0])
        assert found.progress["loss_scale"] == expected.progress["loss_scale"]
        assert largest_difference(found.model, expected.model) < 1e-6
        assert result.train_loss == pytest.approx(plain.train_loss, rel=1e-2)


def replay(settings: TrainSettings, stage: int, stop_at: int) -> list[list[tuple[int, int, float]]]:
    """Version, step and factor of each update of a stage's replicas in an interval that ends early."""
    pipeline_layout = check_pipeline(settings, 3)
    pieces = [Microbatch(step, place, 0, (0, 1)) for step in range(12) for place in range(3)]
    found = []
    for rank in pipeline_layout.holders(stage):
        steps: list[int] = []
        work = MicrobatchSource(
            pipeline_layout,
            rank,
            pieces,
            seed=0,
            fetch=lambda _: iter(()),
            set_lr=lambda step, _, to=steps: to.append(step),
            stop_before=lambda step: step >= stop_at,
        )
        updates = [op for op in stream(pipeline_layout, rank, work) if isinstance(op, Update)]
        factors = [work.factor(update) for update in updates]
        for update in updates:
            work.set_rate(update)
        found.append([(u.version, s, f) for u, s, f in zip(updates, steps, factors)])
    return found


def test_replicas_agree_on_the_last_update_of_an_interval_that_ends_early() -> None:
    settings = unverified_plan((1, 2), Schedule.STASH, microbatches=3)
    first, second = replay(settings, stage=1, stop_at=5)
    assert [(version, step) for version, step, _ in first] == [(v, s) for v, s, _ in second]
    assert [f for *_, f in first] == pytest.approx([0.5] * 7 + [1.0])


@pytest.mark.parametrize("stages", [((0,), (1,), (0,)), ((0, 1), (2,), (1, 0)), ((0, 1), (0, 1, 2))])
@pytest.mark.parametrize("schedule", [Schedule.STASH, Schedule.TWO_BUFFERED])
def test_workers_that_hold_several_stages_agree_on_an_interval_that_ends_early(
    stages: tuple[tuple[int, ...], ...], schedule: Schedule
) -> None:
    layout = Layout(stages)
    pipeline_layout = check_pipeline(placed(layout, schedule, microbatches=3), len(layout.workers))
    pieces = [Microbatch(step, place, 0, (0, 1)) for step in range(12) for place in range(3)]
    ends = replace(pipeline_layout, microbatches=1)
    expected = operations(schedule, ends.layout, 15)
    for rank in layout.workers:
        work = MicrobatchSource(
            ends,
            rank,
            pieces,
            seed=0,
            fetch=lambda _: iter(()),
            set_lr=lambda *_: None,
            stop_before=lambda step: step >= 5,
        )
        assert tuple(stream(ends, rank, work)) == expected[rank]


# Every topology is in tests/sync/test_topology_training.py.
@pytest.mark.parametrize("topology", but_further(("ring", "auto"), "ring"))
def test_replicas_of_a_stage_sum_over_the_topology_that_was_asked_for(tmp_path: Path, topology: str) -> None:
    settings = replace(unverified_plan((3, 1), Schedule.FLUSH, steps=8), topology=TopologySpec(topology))
    run_ranks(4, train_rank, settings, tmp_path / "pipeline", hosts=["a", "a", "b", "b"])
    _, weights = train_here(unverified_job(steps=8), tmp_path / "plain")
    assert largest_difference(final_weights(tmp_path / "pipeline"), weights) < 1e-10


def open_for_another_model(rank: int, settings: TrainSettings, folder: Path) -> tuple[str, list[Any]]:
    worker = PlainWorker()
    with pytest.raises(JobError) as caught:
        train_with(worker, settings, folder)
    return str(caught.value), worker.reports


def test_a_plan_for_another_model_is_refused_by_name_before_the_run_begins(tmp_path: Path) -> None:
    settings = unverified_plan((1, 1), Schedule.FLUSH)
    assert settings.pipeline is not None
    first, *rest = settings.pipeline.plan.stages
    stages = (replace(first, layers=("elsewhere", *first.layers)), *rest)
    other = replace(settings.pipeline, plan=replace(settings.pipeline.plan, stages=stages))
    refused = replace(settings, pipeline=other)
    words, reports = run_ranks(2, open_for_another_model, refused, tmp_path / "run")[0]
    assert words.startswith("parallel.plan: the plan is for another model than")
    assert "it has layer 'elsewhere'" in words
    assert reports == []
