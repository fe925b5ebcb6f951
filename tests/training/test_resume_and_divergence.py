"""What a resumed run may change, what ends a run whose loss is no number, and what its loss is."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.core.errors import CheckpointError, JobError
from plait.core.events import read
from plait.core.run_events import Step
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    SyncSettings,
    TrainSettings,
)
from plait.training import checkpoint as checkpoints
from plait.training import components
from plait.training.run_record import RunRecorder
from plait.training.setup.precision import emulated
from support.averaging import job_store
from support.plans import cut_in_two
from support.training import PlainWorker, saved_weights, train_here, train_rank, unverified_job
from support.world import run_ranks

JOB = unverified_job(steps=6, checkpoint=CheckpointSettings(every_steps=3, keep_last=3))
WILD = OptimizerSettings("sgd", {"lr": 1e300, "momentum": 0.9})
# 1,438 samples: 23 steps of 64 are an epoch.
EPOCH = 23


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 7}, "seed: found 7, but the run was trained with 0"),
        ({"data": DataSettings("digits", 64, shuffle=False)}, "data.shuffle: found False"),
        ({"data": DataSettings("support.training:half_of_digits", 64)}, "samples: found"),
    ],
    ids=["seed", "shuffle", "samples"],
)
def test_samples_in_another_order_are_refused_in_the_middle_of_an_epoch(
    changed: dict[str, Any], words: str, tmp_path: Path
):
    train_here(JOB, tmp_path)
    with pytest.raises(JobError, match=rf"{words}.*in the middle of an epoch: samples would be repeated"):
        train_here(replace(JOB, steps=9, **changed), tmp_path, resume=True)
    # At the end of an epoch the next one may have any order.
    train_here(replace(JOB, steps=EPOCH), tmp_path, resume=True)
    assert train_here(replace(JOB, steps=EPOCH + 1, **changed), tmp_path, resume=True)[0].step == EPOCH + 1


def test_a_run_without_a_loss_scale_goes_on_with_one(tmp_path: Path):
    plain = replace(JOB, precision="float32")
    train_here(plain, tmp_path)
    assert train_here(replace(plain, precision="fp16", steps=8), tmp_path, resume=True)[0].step == 8


def test_a_best_checkpoint_that_is_gone_is_not_held_against_later_ones(tmp_path: Path):
    rule = CheckpointSettings(every_steps=100, keep_last=1, keep_best="loss")
    job = replace(JOB, checkpoint=rule, evaluate=EvaluateSettings(every_steps=3))
    train_here(job, tmp_path)
    folder = RunDir(tmp_path).checkpoints
    assert (folder / "best").resolve().name == "step-000000006"
    state = checkpoints.load(folder / "step-000000006")
    gone = {**state.progress, "best": {"step": 5, "loss": 0.0, "accuracy": 1.0}}
    checkpoints.save(folder, replace(state, progress=gone))
    result, _ = train_here(replace(job, steps=9), tmp_path, resume=True)
    assert result.best["step"] == 9


@pytest.mark.parametrize(
    "damage", [{"position": None}, {"best": 3}, {"loss_scale": 1, "position": {"epoch": "x"}}]
)
def test_a_checkpoint_with_damaged_progress_gives_way_to_the_one_before(
    damage: dict[str, Any], tmp_path: Path
):
    train_here(JOB, tmp_path)
    folder = RunDir(tmp_path).checkpoints
    newest = checkpoints.load(folder / "step-000000006")
    progress = {**newest.progress, **damage}
    if damage == {"best": 3}:
        del progress["early_best"]
    checkpoints.save(folder, replace(newest, progress=progress))
    result, weights = train_here(JOB, tmp_path, resume=True)
    assert result.step == 6
    assert all(torch.equal(weights[name], value) for name, value in newest.model.items())


def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path: Path):
    train_here(JOB, tmp_path)
    folder = RunDir(tmp_path).checkpoints
    for path in checkpoints.list_checkpoints(folder)[1:]:
        path.rename(folder / f".gone-{path.name}")
    (folder / "step-000000006").rename(folder / ".old-step-000000006.123")
    checkpoints.prune(folder, 6, keep_last=1, best=None)
    (kept,) = checkpoints.list_checkpoints(folder)
    assert checkpoints.load(kept).step == 6
    assert train_here(replace(JOB, steps=7), tmp_path, resume=True)[0].step == 7


@pytest.mark.parametrize(
    "damage",
    [
        ('"step": 6', '"step": 90'), ('"tied": {}', '"tied": 3'), ('"files": {', '"files": [], "x": {'),
        ('"progress": {', '"progress": "", "x": {'), ('"crc32"', '"crc33"'),
    ],
    ids=["step", "tied", "files", "progress", "checksum"],
)  # fmt: skip
def test_a_state_that_was_changed_is_refused(damage: tuple[str, str], tmp_path: Path):
    train_here(JOB, tmp_path)
    state = RunDir(tmp_path).checkpoints / "step-000000006" / "state.json"
    text = state.read_text()
    assert damage[0] in text
    state.write_text(text.replace(*damage))
    with pytest.raises(CheckpointError):
        checkpoints.load(state.parent)
    assert train_here(JOB, tmp_path, resume=True)[0].step == 6


def diverge(settings: TrainSettings, folder: Path, kind: str) -> dict[str, Any]:
    """Train well, then resume with a rate that makes the loss no number."""
    wild = replace(settings, steps=400, optimizer=WILD)
    if kind == "one":
        train_here(settings, folder)
        return train_here(wild, folder, resume=True)[0]
    if kind in ("two", "pipeline"):
        run_ranks(2, train_rank, settings, folder)
        return run_ranks(2, train_rank, wild, folder, True)[0][0]
    for job, resume in ((settings, False), (wild, True)):
        with job_store() as address:
            found = run_ranks(2, train_rank, job, folder, resume, address=address)
    return found[0][0]


@pytest.mark.parametrize("kind", ["one", "two", "pipeline", "local-sgd"])
def test_a_loss_that_is_no_number_ends_the_run_and_costs_no_good_checkpoint(kind: str, tmp_path: Path):
    settings = JOB
    if kind == "pipeline":
        settings = cut_in_two(JOB, Schedule.FLUSH, 4)
    if kind == "local-sgd":
        settings = replace(JOB, sync=SyncSettings("local-sgd"))
    result = diverge(settings, tmp_path, kind)
    assert result.reason == "diverged"
    assert result.step < 400
    assert all(torch.isfinite(value).all() for value in saved_weights(tmp_path).values())


LAST = CheckpointSettings(every_steps=3, keep_last=1, keep_best="loss")
GOOD = replace(JOB, steps=3, checkpoint=LAST)
BROKEN = replace(GOOD, steps=4, loss="support.training:broken_gradient")


def break_each(rank: int, jobs: dict[str, TrainSettings], folder: Path, address: str) -> dict[str, str]:
    """How runs end, one after the other, that go on from the state of the run in `folder / "one"`."""
    found = {}
    for name, settings in jobs.items():
        if rank == 0:
            shutil.copytree(folder / "one", folder / name, symlinks=True)
        dist.barrier()
        given = {"address": address} if name == "local-sgd" else {}
        result, _ = train_rank(rank, settings, folder / name, True, in_pieces=name == "pieces", **given)
        found[name] = result.reason
    return found


def test_weights_that_are_no_numbers_end_the_run_and_cost_no_good_checkpoint(tmp_path: Path):
    """Also where the loss of the step is a number still, whoever holds the weights."""
    train_here(GOOD, tmp_path / "one")
    cut = cut_in_two(BROKEN, Schedule.FLUSH, 4)
    averaged = replace(BROKEN, sync=SyncSettings("local-sgd"))
    jobs = {"two": BROKEN, "pipeline": cut, "pieces": cut, "local-sgd": averaged}
    with job_store() as address:
        found = run_ranks(2, break_each, jobs, tmp_path, address)
    assert found[0] == dict.fromkeys(jobs, "diverged")
    assert train_here(BROKEN, tmp_path / "one", resume=True)[0].reason == "diverged"
    for name in ("one", *jobs):
        kept = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        assert kept == ["best", "step-000000003"], name
        assert all(value.isfinite().all() for value in saved_weights(tmp_path / name).values())


def test_weights_that_are_no_numbers_are_not_saved_where_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    train_here(GOOD, tmp_path)
    result, _ = train_here(replace(BROKEN, stop_on_nan=False), tmp_path, resume=True)
    assert (result.reason, result.step) == ("finished", 4)
    (kept,) = checkpoints.list_checkpoints(tmp_path / "checkpoints")
    assert kept.name == "step-000000003"
    assert "no checkpoint of step 4: '0.weight' holds values that are no numbers" in caplog.text


def test_infinities_that_training_does_not_touch_are_saved(tmp_path: Path):
    result, _ = train_here(replace(GOOD, model=ModelSettings("support.training:Masked")), tmp_path)
    assert result.reason == "finished"
    assert saved_weights(tmp_path)["mask"].isinf().any()


def test_such_a_run_goes_on_where_that_is_asked_for(tmp_path: Path):
    result, _ = train_here(replace(JOB, stop_on_nan=False, steps=30, optimizer=WILD), tmp_path)
    assert (result.reason, result.step) == ("finished", 30)
    assert math.isnan(result.train_loss)


def test_equal_runs_report_the_loss_of_their_last_step_however_they_log(tmp_path: Path):
    losses = [
        train_here(replace(JOB, log_every_steps=every), tmp_path / str(every))[0].train_loss
        for every in (None, 1, 4)
    ]
    assert len(set(losses)) == 1


@pytest.mark.parametrize("flags", ["fp asimd bf16", "fpu avx512f avx512_bf16", "fp asimd"])
def test_a_processor_that_emulates_bf16_is_warned_of(
    flags: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    monkeypatch.setattr(Path, "read_text", lambda self: f"Features : {flags}\n")
    cpu = torch.device("cpu")
    assert (emulated("bf16", cpu) is None) == ("bf16" in flags)
    assert emulated("float32", cpu) is None
    assert emulated("bf16", torch.device("cuda")) is None


def test_an_evaluation_is_no_time_of_the_steps_that_are_yet_to_be_recorded(tmp_path: Path) -> None:
    """The steps of a pipeline are recorded later, with the time at which they ended."""
    settings = unverified_job(steps=10)
    settings = replace(settings, log_every_steps=None)
    folder, worker = RunDir(tmp_path), PlainWorker()
    parts = components.build(settings, torch.device("cpu"))
    recorder = RunRecorder(worker, settings, parts, folder, clock=lambda: 100.0)
    recorder.start(0, 10)
    recorder.step(1, 0, torch.tensor(1.0), 0.1, 64, 100.5)
    recorder.step(2, 0, torch.tensor(1.0), 0.1, 64, 100.55)
    recorder.evaluated(2, {"loss": 1.0}, 360, 2.0)
    recorder.saved(2, 1.0, best=False)
    recorder.log_rest()
    result = recorder.end(2, "early-stop", {}, None)
    seconds = [r.event.seconds for r in read(folder.events()) if isinstance(r.event, Step)]
    assert seconds == pytest.approx([0.5, 0.05])
    assert result.samples_per_s == pytest.approx(128 / 0.55, rel=1e-3)
