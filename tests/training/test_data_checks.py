"""Before step 1 workers with unlike data are refused, and a test split that is trained on is told of."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Subset, TensorDataset

from plait.core.errors import DataError
from plait.data import fingerprint
from plait.data.batches import DataSource
from plait.data.fingerprint import repeated_samples, take_fingerprints
from plait.data.streams import checksum
from plait.schema.settings import DataSettings
from plait.training.checks import repeated_reads
from plait.training.checks.data_fingerprints import look_at_data
from plait.workloads import data
from plait.workloads.data.stored import Windows
from support.training import PlainWorker, digits_job, train_here
from support.world import run_ranks


def points(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.arange(count))


def unlike_points(kind: str, rank: int) -> tuple[Any, Any]:
    """The splits of a worker whose data is as `kind` says."""
    if kind == "half copied":
        return points(64 if rank == 0 else 40), points(8, 1)
    if kind == "listed in another order":
        return Subset(points(64), range(64) if rank == 0 else range(63, -1, -1)), points(8, 1)
    if kind == "no test split on one":
        return points(64), points(8, 1) if rank == 0 else None
    if kind == "drawn anew when read":
        return Noisy(), points(8, 1)
    return points(64), points(8, 1)


class Noisy(Dataset[Any]):
    """Samples with noise of a generator of its own, which nobody seeds."""

    def __init__(self) -> None:
        self.generator = numpy.random.default_rng()
        self.reads = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.reads += 1
        return self.generator.normal(size=3), index


KINDS = ["alike", "half copied", "listed in another order", "no test split on one", "drawn anew when read"]


def check_kinds(rank: int) -> dict[str, str]:
    found = {}
    fingerprint.LOOK_S = 10.0  # all samples are read, on a busy machine too
    worker = PlainWorker(hosts=("w0", "w1"))
    for kind in KINDS:
        train, test = unlike_points(kind, rank)
        try:
            look_at_data(worker, (DataSource(train), None if test is None else DataSource(test)), 0, kind)
            found[kind] = "fine"
        except DataError as failure:
            found[kind] = str(failure)
        dist.barrier()
    return found


def test_workers_with_unlike_data_are_refused_with_the_worker_and_its_host():
    answers = run_ranks(2, check_kinds)
    # Whichever came first said what the data is; the other one is refused.
    words = {kind: sorted(answer[kind] for answer in answers) for kind in KINDS}
    assert words["alike"] == words["drawn anew when read"] == ["fine", "fine"]
    assert "64 samples" in words["half copied"][0]
    assert "40 samples" in words["half copied"][0]
    for kind in ("half copied", "listed in another order", "no test split on one"):
        refused, fine = words[kind]
        assert fine == "fine"
        assert refused.startswith("data: worker ")
        assert " on w0 has " in refused
        assert " on w1 has " in refused
    assert "8 of 8 looked at" in words["listed in another order"][0]
    assert "has no data" in words["no test split on one"][0]


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.randn(40, 3).bfloat16(), torch.arange(40)),
        data.build("digits", "test"),
        Windows(torch.arange(400), 5, 400),
        Subset(points(90), range(5, 80)),
    ],
)
def test_samples_that_are_read_at_once_are_those_that_are_read_one_by_one(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fingerprint, "LOOK_S", 10.0)
    source = DataSource(dataset)
    (seen, _) = take_fingerprints((source, None), 0, many=True)
    assert seen is not None
    assert seen.samples == {number: checksum([source.sample(0, number, 0)]) for number in range(len(source))}


def warnings_of(caplog: pytest.LogCaptureFixture, train: Any, test: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        look_at_data(PlainWorker(), (DataSource(train), None if test is None else DataSource(test)), 0)
    return [record.getMessage() for record in caplog.records]


def test_test_samples_that_are_trained_on_are_told_with_how_many(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fingerprint, "LOOK_S", 10.0)
    whole = points(60)
    (words,) = warnings_of(caplog, Subset(whole, range(50)), Subset(whole, range(40, 60)))
    assert words.startswith("data: 10 of the 20 test samples looked at are among the 50 training samples")
    assert "test sample 0 is training sample 40" in words
    (words,) = warnings_of(caplog, whole, whole)
    assert "60 of the 60 test samples" in words
    # In a set far larger than what is looked at, parts of one data set are compared by their indices.
    many = points(200_000)
    (words,) = warnings_of(caplog, Subset(many, range(150_000)), Subset(many, range(149_900, 200_000)))
    assert "test sample 0 is training sample 149900" in words


def test_splits_that_only_look_alike_are_told_of_nothing(caplog: pytest.LogCaptureFixture):
    assert warnings_of(caplog, Subset(points(60), range(40)), Subset(points(60), range(40, 60))) == []
    # Equal indices of unlike data.
    assert warnings_of(caplog, Subset(points(60), range(40)), Subset(points(60, 1), range(20))) == []
    assert warnings_of(caplog, points(60), None) == []
    # Few distinct samples: each is in both splits, and many times in each.
    bits = torch.randint(2, (200, 4), generator=torch.Generator().manual_seed(3))
    few = TensorDataset(bits.float(), bits.sum(1))
    assert warnings_of(caplog, Subset(few, range(150)), Subset(few, range(150, 200))) == []
    # One sample that was recorded twice.
    assert repeated_samples({0: 7, 1: 8, 2: 9}, {0: 7, 1: 10}) == []


class Slow(Dataset[Any]):
    """Samples that take a while to read; some cannot be read at all."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.03)
        if index == 0:
            raise OSError("truncated")
        return torch.tensor([float(index)]), index


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples that come once."""

    def __init__(self) -> None:
        self.samples = iter([(torch.ones(1), 0)])

    def __iter__(self) -> Any:
        return self.samples


def test_a_look_at_the_data_is_short_and_leaves_nothing_behind():
    noisy, stream = Noisy(), Stream()
    before = noisy.generator.bit_generator.state
    slow, drawn = take_fingerprints((DataSource(Slow()), DataSource(noisy)), 0, many=True)
    streamed, _ = take_fingerprints((DataSource(stream), None), 0, many=True)
    assert slow is not None
    assert drawn is not None
    assert streamed is not None
    # 0.1 s in all, of which a part went into reading the first ones again.
    assert 0 < len(slow.samples) < 10
    assert 0 not in slow.samples
    assert (drawn.length, dict(drawn.samples)) == (20, {})
    assert (streamed.length, dict(streamed.samples)) == (None, {})
    assert noisy.generator.bit_generator.state == before
    assert noisy.reads == 0
    assert len(list(stream.samples)) == 1


class Hanging(Dataset[Any]):
    """Samples that a forked process waits for without an end."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        time.sleep(60)


def test_a_data_set_that_hangs_in_another_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plait.data.fingerprint.LONGEST_S", 0.2)
    seen, _ = take_fingerprints((DataSource(Hanging()), None), 0)
    assert seen is not None
    assert (seen.length, dict(seen.samples)) == (10, {})


class Sorted(Dataset[Any]):
    """Samples of which only the last one draws."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 8, 8), float(index)) + (torch.rand(()) if index == 8 else 0.0), index


def sorted_samples(split: str) -> Dataset[Any]:
    return Sorted()


def test_samples_are_read_in_other_processes_only_if_epochs_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    aside: list[object] = []
    monkeypatch.setattr(repeated_reads, "load_aside", lambda items, limit: aside.append(items))
    for number, kind in enumerate(("support.training:digits", "test_data_checks:sorted_samples")):
        job = digits_job(steps=1, data=DataSettings(kind, 4))
        train_here(job, tmp_path / str(number))
        assert len(aside) == 2 * number
