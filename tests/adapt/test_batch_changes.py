"""Changes of the batch size in a running job: no sample is repeated or skipped, and resuming is exact."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from plait.adapt.changes import BatchSizeChange, WorkersChange
from plait.cli.train import adapt_overrides
from plait.core import events
from plait.core.errors import JobError
from plait.core.run_events import Changed, Step
from plait.data.sampler import Position, batches, epoch_order
from plait.launcher.run_dir import RunDir
from plait.schema.job import make_job
from plait.schema.settings import (
    UNVERIFIED,
    DataSettings,
    LrScheduleSettings,
    ModelSettings,
    OptimizerSettings,
    PolicySettings,
    TrainSettings,
)
from plait.training import components
from plait.training.choose_engine import make_loop, whole_model_engine
from plait.training.run import Run
from plait.training.run_loop import RunLoop
from support.changes import StepTable
from support.further import but_further
from support.training import PlainWorker, digits_job, largest_difference, unverified_job

SAMPLES = 40
used: list[int] = []


class Recorded(Dataset[Any]):
    """Samples that note when they are read."""

    def __init__(self, split: str) -> None:
        self._records = split == "train"

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self._records:
            used.append(index)
        return torch.full((2,), float(index)), torch.tensor([float(index)])


class Stream(IterableDataset[Any]):
    """The same samples, in their order, as a stream that does not say how long it is."""

    def __init__(self, split: str) -> None:
        self._records = split == "train"

    def __iter__(self) -> Iterator[Any]:
        for index in range(SAMPLES):
            yield torch.full((2,), float(index)), torch.tensor([float(index)])


class Sums(nn.Module):
    """A model that notes the inputs that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            used.extend(int(value) for value in x[:, 0])
        out: torch.Tensor = self.layer(x)
        return out


def job(**changes: Any) -> TrainSettings:
    return digits_job(
        **{
            "model": ModelSettings("torch.nn:Linear", {"in_features": 2, "out_features": 1}),
            "data": DataSettings("test_batch_changes:Recorded", 8),
            "loss": "mse",
            "optimizer": OptimizerSettings("sgd", {"lr": 1e-4}),
            "steps": None,
            "epochs": 3,
            # Nothing is read but for steps.
            "verify": UNVERIFIED,
            **changes,
        }
    )


def trained(settings: TrainSettings, folder: Path, table: dict[int, Any]) -> Run:
    """A run in this process, changed after the steps of the table."""
    parts = components.build(settings, torch.device("cpu"))
    run = Run(PlainWorker(), settings, parts, RunDir(folder))
    RunLoop(run, whole_model_engine(run), [StepTable(table)]).train(resume=False)
    return run


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), max_size=8), st.booleans())
def test_the_sampler_gives_every_sample_once_an_epoch_whatever_the_batches(changes, shuffle):
    position, sizes = Position(), itertools.chain(changes, itertools.repeat((10**6, 7)))
    seen: list[int] = []
    while position.epoch < 3:
        steps, size = next(sizes)
        order = batches(position, SAMPLES, size, seed=1, shuffle=shuffle, keep_last=True)
        for batch in itertools.islice(order, steps):
            if batch.epoch >= 3:
                break
            seen += batch.samples
            position = batch.after
    expected = [sample for epoch in range(3) for sample in epoch_order(1, epoch, SAMPLES, shuffle)]
    assert seen == expected


@given(table=st.dictionaries(st.integers(0, 12), st.integers(1, 45), max_size=4))
@settings(max_examples=8, deadline=None)
def test_a_run_uses_every_sample_once_an_epoch_whatever_its_changes(table, tmp_path_factory):
    used.clear()
    changes = {step: BatchSizeChange(size) for step, size in table.items()}
    trained(job(), tmp_path_factory.mktemp("run"), changes)
    expected = [sample for epoch in range(3) for sample in epoch_order(0, epoch, SAMPLES, True)]
    assert used == expected


def test_a_stream_whose_batches_change_gives_every_sample_once_an_epoch(tmp_path: Path):
    used.clear()
    changes = {2: BatchSizeChange(9), 4: BatchSizeChange(5), 9: BatchSizeChange(30)}
    stream = job(
        data=DataSettings("test_batch_changes:Stream", 8), model=ModelSettings("test_batch_changes:Sums")
    )
    trained(dataclasses.replace(stream, precision="float32"), tmp_path, changes)
    assert used == [*range(SAMPLES)] * 3


def test_steps_are_counted_anew_and_the_schedule_follows_the_samples(tmp_path: Path):
    """Five batches of 8, then batches of 20: two of each epoch. Cosine ends where it would have."""
    schedule = LrScheduleSettings("cosine")
    run = trained(job(lr_schedule=schedule), tmp_path, {5: BatchSizeChange(20, 1.5)})
    assert run.trial.step == 5 + 2 * 2
    log = [r.event for r in events.read(RunDir(tmp_path).events())]
    lrs = [event.lr / 1e-4 for event in log if isinstance(event, Step)]
    plain = [r.event.lr / 1e-4 for r in _plain(schedule, tmp_path / "plain")]
    assert lrs[:5] == plain[:5]
    assert lrs[5:] == pytest.approx([1.5 * plain[step] for step in (5, 8, 10, 12)], abs=0.08)
    assert lrs[5] == pytest.approx(1.5 * plain[5])
    (changed,) = (event for event in log if isinstance(event, Changed))
    assert changed.change == {"batch_size": 20, "lr_factor": 1.5}


def _plain(schedule: LrScheduleSettings, folder: Path) -> list[Any]:
    trained(job(lr_schedule=schedule), folder, {})
    return [r for r in events.read(RunDir(folder).events()) if isinstance(r.event, Step)]


TABLE = {"changes": {4: {"batch_size": 96, "lr_factor": 1.5}, 9: {"batch_size": 40}}}
ADAPTED = unverified_job(
    steps=None,
    epochs=1,
    lr_schedule=LrScheduleSettings("cosine"),
    adapt=(PolicySettings("steps", TABLE),),
)


def through_the_job(
    rank: int, size: int, settings: TrainSettings, folder: Path, resume: bool = False
) -> tuple[dict[str, Any], Any]:
    torch.set_num_threads(1)
    parts = components.build(settings, torch.device("cpu"))
    loop = make_loop(PlainWorker(), settings, parts, RunDir(folder))
    result = loop.train(resume)
    return result, {name: value.tolist() for name, value in parts.model.state_dict().items()}


# Before the second change, as after it.
@pytest.mark.parametrize("stop_at", but_further((6, 12), 6))
def test_a_run_resumed_after_a_change_takes_the_steps_of_one_that_was_not_interrupted(
    stop_at: int, tmp_path: Path
):
    whole, weights = through_the_job(0, 1, ADAPTED, tmp_path / "whole")
    assert whole.steps == 4 + 5 + -(-(1438 - 4 * 64 - 5 * 96) // 40)
    # A checkpoint after every step; the later ones are lost.
    kept = dataclasses.replace(ADAPTED.checkpoint, every_steps=1, keep_last=100)
    partial = dataclasses.replace(ADAPTED, checkpoint=kept)
    through_the_job(0, 1, partial, tmp_path / "part")
    for path in RunDir(tmp_path / "part").checkpoints.glob("step-*"):
        if int(path.name.removeprefix("step-")) > stop_at:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    result, resumed = through_the_job(0, 1, partial, tmp_path / "part", True)
    assert result.step == whole.step
    assert largest_difference(weights, resumed) == 0.0


def test_a_job_resumed_with_another_batch_size_in_its_file_takes_that(tmp_path: Path):
    first = dataclasses.replace(ADAPTED, steps=6, epochs=None)
    through_the_job(0, 1, first, tmp_path)
    again = dataclasses.replace(first, steps=8, adapt=(), data=DataSettings("digits", 32))
    parts = components.build(again, torch.device("cpu"))
    loop = make_loop(PlainWorker(), again, parts, RunDir(tmp_path))
    loop.train(resume=True)
    assert (loop.run.batch_size, loop.run.trial.batch.lr_factor) == (32, 1.0)
    assert loop.run.trial.position.sample == 4 * 64 + 2 * 96 + 2 * 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (BatchSizeChange(0), "at least one sample a worker"),
        (BatchSizeChange(8, 0.0), "above 0"),
        (WorkersChange(3), "the job.s workers are fixed; set parallel.elastic: true"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_in_words(change, words, tmp_path: Path):
    with pytest.raises(JobError, match=words):
        trained(job(), tmp_path, {2: change})


def test_batches_larger_than_an_epoch_that_drops_its_last_are_refused(tmp_path: Path):
    dropping = job(data=DataSettings("test_batch_changes:Recorded", 8, last_batch="drop"))
    with pytest.raises(JobError, match="found 41, but there are only 40 samples"):
        trained(dropping, tmp_path, {2: BatchSizeChange(41)})


def test_the_job_file_names_policies_and_monitors():
    content = {
        "name": "t",
        "model": "m:n",
        "data": {"kind": "digits", "batch_size": 8},
        "steps": 1,
        "monitor": ["noise-scale"],
        "adapt": [{"kind": "batch-size", "most": 64}],
    }
    found = make_job(content).settings()
    assert found.monitor == ("noise-scale",)
    assert found.adapt == (PolicySettings("batch-size", {"most": 64}),)
    with pytest.raises(JobError, match="monitor"):
        make_job({**content, "monitor": ["noise"]})
    with pytest.raises(JobError, match="did you mean 'most'"):
        components.check(dataclasses.replace(job(), adapt=(PolicySettings("batch-size", {"mst": 64}),)))


def test_the_command_line_sets_policies_by_kind_or_with_options():
    content = {"name": "t", "model": "m:n", "data": {"kind": "digits", "batch_size": 8}, "steps": 1}
    found = make_job(content, adapt_overrides(["topology", "{kind: batch-size, most: 64}"])).settings().adapt
    assert found == (PolicySettings("topology"), PolicySettings("batch-size", {"most": 64}))
    assert adapt_overrides(None) == []
    with pytest.raises(JobError, match="--adapt: found"):
        adapt_overrides(["{kind: "])
