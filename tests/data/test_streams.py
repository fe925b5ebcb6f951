"""Streams: the samples of a step do not depend on the workers, an epoch ends when the stream does."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from plait.core import events as core_events
from plait.core import run_events as events
from plait.core.errors import DataError, JobError
from plait.data.batches import DataSource
from plait.data.sampler import Position
from plait.data.streams import StreamOrder, stream_batches
from plait.launcher.run_dir import RunDir
from plait.measure.profile_job import profile_job
from plait.planner.schedules.in_flight import Schedule
from plait.report.terminal import describe
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    LrScheduleSettings,
    SyncSettings,
    TrainSettings,
)
from plait.sweeping.settings import SweepSettings
from plait.training import checkpoint as checkpoints
from plait.training import components
from support.further import but_further
from support.plans import cut_in_two
from support.sweeping import same_table, sweep_here, sweep_of, sweep_rank, sweeps_rank, trial_alone
from support.training import (
    largest_difference,
    saved_weights,
    train_each,
    train_here,
    train_rank,
    unverified_job,
)
from support.world import WorldError, run_ranks

SAMPLES = 70


@functools.cache
def images(split: str) -> list[Any]:
    """Images and their classes."""
    generator = torch.Generator().manual_seed(len(split))
    pixels = torch.randn(SAMPLES + 10, 1, 8, 8, generator=generator)
    return list(zip(pixels, (pixels.sum((1, 2, 3)) > 0).long()))


class Images(IterableDataset[Any]):
    """Images, one after the other; each may be changed at random."""

    def __init__(self, split: str, noise: float = 0.0, note: str = "") -> None:
        self.images = images(split)
        self.noise = noise
        self.note = note

    def __iter__(self) -> Iterator[Any]:
        for index in range(SAMPLES):
            yield self.sample(index)

    def sample(self, index: int) -> Any:
        if self.note:
            with open(self.note, "a") as file:
                file.write(f"{os.getpid()} {index}\n")
        image, label = self.images[index]
        return image + self.noise * torch.rand(()), label


class Sized(Images):
    def __len__(self) -> int:
        return SAMPLES


class Liar(Images):
    """A stream that is shorter than it says, or longer."""

    def __init__(self, split: str, more: int = 20) -> None:
        super().__init__(split)
        self.more = more

    def __len__(self) -> int:
        return SAMPLES + self.more


def longer_to_test(split: str) -> Any:
    return Sized(split) if split == "train" else Liar(split, -6)


class Endless(Images):
    def __iter__(self) -> Iterator[Any]:
        for index in count():
            yield self.sample(index % SAMPLES)


class DividedLater(Images):
    """Is divided by rank from its eleventh batch of 16 on."""

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for index in range(200):
            yield self.sample((index + (rank if index >= 160 else 0)) % SAMPLES)


class Stateful(Images):
    """Says where it is, and goes on from there; each epoch begins one image further."""

    def __init__(self, split: str, note: str = "", tuples: bool = False) -> None:
        super().__init__(split, note=note)
        self.tuples = tuples
        self.begun, self.next = 0, 0

    def __iter__(self) -> Iterator[Any]:
        if not self.next:
            self.begun += 1
        while self.next < SAMPLES:
            self.next += 1
            yield self.sample(self.begun + self.next - 2)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        numbers = (self.begun, self.next)
        return {"at": numbers if self.tuples else list(numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun, self.next = state["at"]


class Epochs(Images):
    """Each epoch begins where `set_epoch` says."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(SAMPLES):
            yield self.sample(index + 3 * self.epoch)


class InOrder:
    """The same images as a map-style set."""

    def __init__(self, split: str, shift: int = 0) -> None:
        self.images = images(split)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.images[index]


def divided(split: str) -> Iterator[Any]:
    """A stream that divides itself among the workers, as many do elsewhere."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return _Every(images(split), rank, size)


class _Every:
    def __init__(self, images: Any, rank: int, size: int) -> None:
        self.images, self.rank, self.size = images, rank, size

    def __iter__(self) -> Iterator[Any]:
        return (self.images[index] for index in range(self.rank, SAMPLES, self.size))


def endless(split: str) -> Any:
    """A stream without an end; the test split has one."""
    return Endless(split) if split == "train" else Images(split)


def once(split: str) -> Iterator[Any]:
    return iter(Images(split))


def job(kind: str = "Images", loaders: int = 0, last_batch: Any = "keep", **changes: Any) -> TrainSettings:
    options = changes.pop("options", {})
    values: dict[str, Any] = {
        "data": DataSettings(
            f"test_streams:{kind}", 16, options, shuffle=False, last_batch=last_batch, loaders=loaders
        ),
        "steps": None,
        "epochs": 2,
        "evaluate": EvaluateSettings(every_steps=5),
    }
    return unverified_job(**{**values, **changes})


def run_events(folder: Path, kind: type) -> list[Any]:
    found = (record.event for record in core_events.read(RunDir(folder).events()))
    return [event for event in found if isinstance(event, kind)]


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_a_stream_trains_as_a_set_in_the_same_order(last_batch: str, tmp_path: Path) -> None:
    result, weights = train_here(job("InOrder", last_batch=last_batch), tmp_path / "set")
    stream, same = train_here(job(last_batch=last_batch), tmp_path / "stream")
    assert largest_difference(weights, same) == 0.0
    assert stream.test == result.test
    steps = 10 if last_batch == "keep" else 8
    assert (stream.step, stream.steps, stream.reason) == (steps, steps, "finished")
    # Nothing is evaluated twice though nobody knew which step would be the last.
    evaluated = [event.step for event in run_events(tmp_path / "stream", events.Evaluated)]
    assert evaluated == ([5, 10] if last_batch == "keep" else [5, 8])
    (started,) = run_events(tmp_path / "stream", events.RunStarted)
    assert (started.samples, started.steps) == (None, None)
    assert {event.samples for event in run_events(tmp_path / "stream", events.Evaluated)} == {SAMPLES}


def train_with_and_without_loaders(rank: int, folder: Path) -> list[Any]:
    jobs = [job(loaders=loaders, options={"noise": 1.0}) for loaders in (0, 1)]
    return [train_rank(rank, settings, folder / str(number)) for number, settings in enumerate(jobs)]


def test_the_samples_of_a_step_do_not_depend_on_workers_or_loaders(tmp_path: Path) -> None:
    one, weights = train_here(job(options={"noise": 1.0}), tmp_path / "one")
    for runs in run_ranks(3, train_with_and_without_loaders, tmp_path):
        for result, found in runs:
            assert largest_difference(weights, found) < 1e-12
            assert result.test["loss"] == pytest.approx(one.test["loss"], abs=1e-12)
            assert result.step == 10


class Refilled(IterableDataset[Any]):
    """Fills one tensor again and again, as readers of large files do."""

    def __iter__(self) -> Any:
        sample = torch.zeros(1)
        for number in range(4):
            yield sample.fill_(number), 0


def test_batches_of_one_sample_may_come_in_one_tensor() -> None:
    order = StreamOrder(Position(), 1, keep_last=True, epochs=1, seed=0)
    found = [batch.content[0].item() for batch in stream_batches(DataSource(Refilled()), order, 0, 1, 0)]
    assert found == [0.0, 1.0, 2.0, 3.0]


def test_steps_end_a_run_over_a_stream_and_epochs_follow_one_another(tmp_path: Path) -> None:
    _, weights = train_here(job("InOrder", steps=12, epochs=None), tmp_path / "set")
    for kind, loaders in (("Images", 0), ("Sized", 1)):
        result, found = train_here(job(kind, loaders, steps=12, epochs=None), tmp_path / kind)
        assert largest_difference(weights, found) == 0.0
        assert (result.step, result.steps) == (12, 12)
    # set_epoch is called where the data set has it.
    _, found = train_here(job("Epochs", steps=12, epochs=None), tmp_path / "epochs")
    assert largest_difference(weights, found) > 1e-3


def test_a_length_that_is_an_estimate_ends_no_run_early_or_late(tmp_path: Path) -> None:
    result, _ = train_here(job("Liar", lr_schedule=LrScheduleSettings("cosine")), tmp_path)
    (started,) = run_events(tmp_path, events.RunStarted)
    assert (started.samples, started.steps) == (SAMPLES + 20, 12)
    assert (result.step, result.steps) == (10, 10)


def test_progress_of_a_run_whose_end_nobody_knows_shows_steps_without_a_total() -> None:
    assert describe({"step": 4, "steps": None, "loss": 0.5, "samples_per_s": 10.0}) == (
        "step 4  loss 0.5  10 samples/s"
    )


@pytest.mark.parametrize(
    ("kind", "cut", "loaders"), [("Epochs", 3, 0), ("Epochs", 5, 0), ("Stateful", 5, 0), ("Stateful", 7, 1)]
)
def test_a_resumed_run_goes_on_where_the_stream_was(
    kind: str, cut: int, loaders: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After three and seven steps within an epoch, after five where one has just ended."""
    _, weights = train_here(job(kind), tmp_path / "whole")
    note = tmp_path / "note"
    short = job(kind, loaders, steps=cut, epochs=None, options={"note": str(note)})
    train_here(short, tmp_path / "cut")
    note.write_text("")
    with caplog.at_level(logging.WARNING):
        resumed = job(kind, loaders, options={"note": str(note)})
        result, found = train_here(resumed, tmp_path / "cut", resume=True)
    assert largest_difference(weights, found) == 0.0
    assert result.step == 10
    skipped = 0 if kind == "Stateful" else cut % 5 * 16
    warned = [r.message for r in caplog.records if "are read again and skipped" in r.message]
    assert len(warned) == (1 if skipped else 0)
    # What is left of two epochs, and an evaluation at the end; one more where the fifth step was to come.
    left = 2 * SAMPLES - 16 * cut if cut < 5 else SAMPLES - 16 * (cut - 5)
    assert len(note.read_text().splitlines()) == skipped + left + SAMPLES * (1 + (cut < 5))


def test_a_state_that_a_checkpoint_cannot_hold_is_reported_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = job("Stateful", steps=3, epochs=None, options={"tuples": True})
    with caplog.at_level(logging.WARNING):
        train_here(settings, tmp_path)
    assert (
        sum("state_dict holds values that a checkpoint cannot keep" in r.message for r in caplog.records) == 1
    )
    newest = checkpoints.load(checkpoints.list_checkpoints(tmp_path / "checkpoints")[0])
    assert newest.progress["position"] == {"epoch": 0, "sample": 48, "stream": None}


def test_workers_that_read_unlike_streams_are_refused(tmp_path: Path) -> None:
    train_here(job("divided"), tmp_path / "one")
    with pytest.raises(WorldError, match="worker 1 read other samples than worker 0"):
        run_ranks(2, train_rank, job("divided"), tmp_path / "two")


def test_they_are_refused_at_the_end_where_that_is_the_next_look(tmp_path: Path) -> None:
    later = job("DividedLater", steps=12, epochs=None)
    with pytest.raises(WorldError, match="worker 1 read other samples than worker 0"):
        run_ranks(2, train_rank, later, tmp_path / "two")


def test_a_stream_that_cannot_begin_anew_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sample in epoch 1; expected a data set whose __iter__ starts"):
        train_here(job("once", evaluate=EvaluateSettings()), tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("Images", {"sync": SyncSettings("partial-reduce")}, "sync: found 'partial-reduce', but .* stream"),
        ("Images", {"sync": SyncSettings("local-sgd")}, "use sync: all-reduce, or a map-style data set"),
        ("Images", {"loaders": 2}, "data.loaders: found 2, but .* is a stream.*use loaders: 1 or 0"),
        ("Images", {"lr_schedule": LrScheduleSettings("cosine")}, "lr_schedule.kind: found 'cosine', but"),
        ("once", {"loaders": 2}, "data.loaders: found 2, but .* is a stream"),
        ("once", {"sync": SyncSettings("auto")}, "sync: found 'auto', but .* is a stream"),
    ],
)
def test_what_needs_samples_by_index_or_a_known_length_is_refused(
    kind: str, changes: Any, words: str
) -> None:
    settings = job(kind, **changes)
    known_before_start = kind == "Images" and "lr_schedule" not in changes
    with pytest.raises(JobError, match=words):
        components.check(settings) if known_before_start else components.build(settings, torch.device("cpu"))


# Trials of unlike batch sizes and seeds each have a pass of their own.
STREAMED = {
    "with a state": (job("Stateful", steps=9, epochs=None), "optimizer.lr=0.1,0.2", "seed=0,1"),
    "in epochs": (job("Sized", options={"noise": 0.5}), "optimizer.lr=0.1,0.2", "data.batch_size=16,20"),
}


# Streams in epochs are trained by one worker above; with a state, more can go wrong.
@pytest.mark.parametrize("name", but_further(STREAMED, "in epochs"))
def test_each_trial_of_a_sweep_reads_a_stream_as_it_does_alone(name: str, tmp_path: Path) -> None:
    one, *over = STREAMED[name]
    sweep = sweep_of(*over, job=replace(one, checkpoint=CheckpointSettings(every_steps=2)))
    found = sweep_here(sweep, tmp_path / "sweep")
    check_streamed(sweep, found, tmp_path)
    # Interrupted after its first checkpoints, it goes on from there.
    saved = tmp_path / "cut" / "trials" / "0000" / "checkpoints"
    stopped = sweep_here(sweep, tmp_path / "cut", stop_file=saved)
    assert stopped["reason"] == "stopped"
    assert same_table(sweep_here(sweep, tmp_path / "cut", resume=True), found)


def check_streamed(sweep: SweepSettings, found: dict[str, Any], folder: Path) -> None:
    assert found["reason"] == "finished"
    for trial in found["trials"]:
        alone, _ = trial_alone(sweep, trial["values"], folder / str(trial["trial"]))
        assert trial["metrics"] == pytest.approx(alone.test, abs=1e-9)


# Workers share a stream, trials read one, and so does a pipeline, each by itself beside.
@pytest.mark.extended
def test_workers_that_train_an_array_share_a_stream(tmp_path: Path) -> None:
    replicated = replace(sweep_of("optimizer.lr=0.1,0.2", job=job("Sized")), replicas=2)
    cut = sweep_of("optimizer.lr=0.1,0.2", job=cut_in_two(job("Sized"), Schedule.FLUSH, microbatches=2))
    found = run_ranks(2, sweeps_rank, {"replicas": replicated, "stages": cut}, tmp_path)[0]
    check_streamed(replicated, found["replicas"], tmp_path / "alone")
    whole = replace(cut, train=replace(cut.train, pipeline=None))
    check_streamed(whole, found["stages"], tmp_path / "whole")


def test_workers_of_an_array_that_read_unlike_streams_are_refused(tmp_path: Path) -> None:
    sweep = replace(sweep_of("optimizer.lr=0.1,0.2", job=job("divided", steps=3, epochs=None)), replicas=2)
    with pytest.raises(WorldError, match="worker 1 read other samples than worker 0"):
        run_ranks(2, sweep_rank, sweep, tmp_path)


def test_a_sweep_over_a_stream_without_length_is_in_steps(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="epochs: found 2, but .* is a stream without __len__, and trials are"):
        sweep_here(sweep_of("optimizer.lr=0.1,0.2", job=job()), tmp_path)


def test_a_pipeline_trains_on_a_stream_and_evaluates_on_one(tmp_path: Path) -> None:
    jobs = {"sized": job("Sized", loaders=1), "endless": job("endless", steps=6, epochs=None)}
    piped = {name: cut_in_two(one, Schedule.FLUSH, microbatches=2) for name, one in jobs.items()}
    found = run_ranks(2, train_each, piped, tmp_path)[0]
    for name, settings in jobs.items():
        result, weights = train_here(settings, tmp_path / f"{name} alone")
        assert largest_difference(weights, saved_weights(tmp_path / name)) < 1e-12
        assert found[name].test["loss"] == pytest.approx(result.test["loss"], abs=1e-12)


def test_a_pipeline_wants_to_know_where_epochs_end(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="epochs: found 2, but .* is a stream without __len__.*give steps"):
        components.build(cut_in_two(job(), Schedule.FLUSH, 2), torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("Liar", {}, "the stream ended after 70 samples of epoch 0, but its __len__ says 90; give it a"),
        pytest.param(
            "Liar",
            {"more": -6},
            "the stream gave sample 65 in epoch 0, but its __len__ says 64; give it a __len__",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "longer_to_test",
            {},
            "the stream gave sample 65 in epoch 0, but its __len__ says 64",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_pipeline_refuses_a_stream_of_another_length_than_it_says(
    kind: str, options: Any, words: str, tmp_path: Path
) -> None:
    settings = job(kind, steps=5, epochs=None, options=options)
    with pytest.raises(WorldError, match=words):
        run_ranks(2, train_rank, cut_in_two(settings, Schedule.FLUSH, 2), tmp_path)


def test_a_job_with_a_stream_is_profiled() -> None:
    found = profile_job(job(), 4, repeats=1)
    assert found.batch == 4
    assert found.loading_s > 0
