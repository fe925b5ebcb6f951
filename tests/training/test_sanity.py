"""Two test batches are evaluated before step 1: what is broken shows at once, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from plait.core.codec import encode
from plait.core.errors import JobError
from plait.launcher.run_dir import RunDir
from plait.schema.settings import UNVERIFIED, DataSettings, EvaluateSettings, ModelSettings, TrainSettings
from plait.training import components
from plait.training.checks.first_evaluation import try_evaluation
from plait.training.worker import train
from support.sweeping import sweep_here, sweep_of
from support.training import PlainWorker, digits_job, saved_weights

HERE = "test_sanity"


def points(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


class Noisy(Dataset[Any]):
    """Samples with noise of a generator of the set's own, which goes on from read to read."""

    def __init__(self, split: str) -> None:
        self.points = points(24 if split == "train" else 14)
        self.generator = numpy.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        return x + torch.from_numpy(self.generator.normal(size=4)).float(), y


class Once(IterableDataset[Any]):
    """A stream whose iterator is made once, and goes on where it was left."""

    def __init__(self, split: str) -> None:
        self.samples = iter([points(14)[i] for i in range(14)])

    def __iter__(self) -> Any:
        return self.samples


def streamed(split: str) -> Any:
    return points(24) if split == "train" else Once(split)


class Broken(Dataset[Any]):
    """A test split whose last sample cannot be read; `calls` counts how often a metric was computed."""

    def __init__(self, split: str, at: int = 6) -> None:
        self.points, self.split, self.at = points(24 if split == "train" else 14), split, at

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        if self.split == "test" and index == self.at:
            raise OSError(f"image {index} is truncated")
        return self.points[index]


class Opaque(TensorDataset):
    """Batches with an object that no other process can be given."""

    def __init__(self, split: str) -> None:
        super().__init__(*points(12).tensors)

    def collate_fn(self, samples: list[Any]) -> Any:
        xs, ys = zip(*samples)
        return torch.stack(xs), Target(torch.stack(ys))


class Target:
    def __init__(self, classes: torch.Tensor) -> None:
        self.classes = classes


class Keeping(nn.Module):
    """A model that keeps, counts and draws in evaluation as it does in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += len(x)
        y = self.norm(self.layer(x))
        self.replaced = 0.9 * self.replaced + y.detach().mean(0)
        scale = 1 + 0.01 * (self.calls % 3) + 0.001 * self.seen
        return y * scale + 0.01 * torch.randn_like(y) + 0.01 * self.replaced


class CountingLoss(nn.Module):
    """A loss that grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output, target) * (1 + 0.01 * self.calls)


class CountingMetric:
    """A metric that counts how often it was computed."""

    mode = "max"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> tuple[int, int]:
        self.calls += 1
        return self.calls, 1


counting = CountingMetric()


def job(kind: str = "Noisy", **changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "model": ModelSettings(f"{HERE}:Keeping"),
        "data": DataSettings(f"{HERE}:{kind}", 5),
        "evaluate": EvaluateSettings(every_steps=3),
        "precision": "float32",
        "steps": 7,
    }
    return digits_job(**{**values, **changes})


def trained(settings: TrainSettings, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The result of a run and its weights, as a worker process makes them."""
    order = {"settings": encode(settings), "folder": str(folder), "resume": False}
    return train(PlainWorker(), order), saved_weights(folder)


@pytest.mark.parametrize("data", ["Noisy", "streamed"])
def test_a_run_is_the_same_with_and_without_the_batches_that_are_tried(data: str, tmp_path: Path):
    found = []
    for number in (0, 2):
        counting.calls = 0
        # A stream that comes once can be evaluated once.
        every = None if data == "streamed" else 3
        evaluate = EvaluateSettings(every, f"{HERE}:counting", sanity_batches=number)
        settings = job(data, loss=f"{HERE}:CountingLoss", evaluate=evaluate, verify=UNVERIFIED)
        found.append(trained(settings, tmp_path / str(number)))
    (plain, weights), (tried, other) = found
    assert tried["test"] == plain["test"]
    assert (tried["train_loss"], tried["steps"]) == (plain["train_loss"], plain["steps"])
    assert all(torch.equal(weights[name], other[name]) for name in weights)


def bad_metric(output: Any, target: Any) -> Any:
    raise IndexError("no such class")


def two_scores(output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """As the precision and the recall of a class are, which are no sum and count."""
    hit, mine = output.argmax(-1) == target, target == 1
    return float(hit.float().mean()), float(torch.sigmoid(output[mine]).mean())


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean by weights, whose sum is no count of samples."""
    weights = 0.3 + target
    return (weights * (output.argmax(-1) == target)).sum(), weights.sum()


def of_each(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        ({"kind": "Broken"}, OSError, "image 6 is truncated"),
        ({"evaluate": EvaluateSettings(metric=f"{HERE}:bad_metric")}, IndexError, "no such class"),
        (
            {"evaluate": EvaluateSettings(metric=f"{HERE}:of_each", batch_size=2)},
            JobError,
            r"of_each returned tensor\(.* for a batch, expected \(sum, count\), two",
        ),
        (
            {"evaluate": EvaluateSettings(metric=f"{HERE}:two_scores", batch_size=6)},
            JobError,
            r"two_scores returned .*second number counts nothing; two metrics.*metrics=\[precision, recall\]",
        ),
    ],
)
def test_what_is_broken_in_an_evaluation_shows_before_the_first_step(
    broken: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
):
    with pytest.raises(error, match=words) as caught:
        trained(job(**broken), tmp_path)
    assert "before the first step; evaluate.sanity_batches: 0 leaves it out" in caught.value.__notes__[-1]
    assert not RunDir(tmp_path).events().exists()


BEST = [0.0]


def remembered(output: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    BEST[0] = 1.0
    return float(output.sum()), len(target)


def test_what_a_metric_keeps_outside_of_itself_is_put_back(tmp_path: Path):
    evaluate = EvaluateSettings(metric=f"{HERE}:remembered", mode="max")
    settings = job(evaluate=evaluate)
    parts = components.build(settings, torch.device("cpu"))
    try_evaluation(parts, settings, 0, 1)
    assert BEST == [0.0]


def largest(output: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    return float(output.max()), 1


def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    return float(output.sum()), len(target)


def recall(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Never divides by zero, but counts one where there is none."""
    mine = target == 2
    return (output.argmax(-1)[mine] == 2).sum(), mine.sum().clamp(min=1)


def balanced(output: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    """The mean over the classes of a batch, which shows where there are several."""
    means = [float(output[target == each].mean()) for each in target.unique()]
    return sum(means) / len(means) * len(target), len(target)


class Sorted(TensorDataset):
    """One class after the other, as folders of images are read."""

    def __init__(self, split: str) -> None:
        x, y = points(24).tensors
        super().__init__(x, y.sort().values)


@pytest.mark.parametrize(
    ("data", "metric", "size", "words"),
    [
        ("Noisy", "largest", 5, "largest of 5 test samples is"),
        pytest.param("Noisy", "recall", 6, "recall of 6 test samples is", marks=pytest.mark.extended),
        ("Sorted", "balanced", 4, "balanced of 4 test samples is"),
        ("Noisy", "counting", 5, "counting changes self.calls when it is called"),
        pytest.param("Sorted", "summed", 5, None, marks=pytest.mark.extended),
        ("Sorted", "weighted", 5, None),
    ],
)
def test_a_metric_that_goes_by_how_samples_are_cut_is_said(
    data: str, metric: str, size: int, words: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    evaluate = EvaluateSettings(metric=f"{HERE}:{metric}", batch_size=size)
    trained(job(data, evaluate=evaluate), tmp_path)
    said = capfd.readouterr().err
    assert f"evaluate.metric: {words}" in said if words else "evaluate.metric" not in said


def test_a_sweep_tries_an_evaluation_before_its_first_step(tmp_path: Path):
    settings = sweep_of("optimizer.lr=0.01,0.1", job=job("Broken", evaluate=EvaluateSettings()))
    with pytest.raises(OSError, match="image 6 is truncated"):
        sweep_here(settings, tmp_path)
    assert not list((tmp_path / "trials").glob("*"))
    assert '"kind":"trial-step"' not in RunDir(tmp_path).events().read_text()


class LateFault(Dataset[Any]):
    """A training split one of whose samples cannot be read."""

    def __init__(self, split: str) -> None:
        self.points, self.at = points(24), 20 if split == "train" else -1

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise OSError("no such block")
        return self.points[index]


def test_the_points_of_a_sweep_that_fails_are_on_disk(tmp_path: Path):
    settings = sweep_of("optimizer.lr=0.01,0.1", job=job("LateFault", data=late_data(), verify=UNVERIFIED))
    with pytest.raises(OSError, match="no such block"):
        sweep_here(settings, tmp_path)
    # In order, four batches of five come before it.
    assert '"kind":"trial-step","trial":0,"step":4' in RunDir(tmp_path).events().read_text()


def late_data() -> DataSettings:
    return DataSettings(f"{HERE}:LateFault", 5, shuffle=False)


def target_loss(output: torch.Tensor, target: Target) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target.classes)


def test_batches_that_no_other_process_can_hand_over_are_read_here():
    settings = job(
        "Opaque", loss=f"{HERE}:target_loss", evaluate=EvaluateSettings(metric=f"{HERE}:bad_metric")
    )
    parts = components.build(settings, torch.device("cpu"))
    with pytest.raises(IndexError, match="no such class"):
        try_evaluation(parts, settings, 0, 1)
    try_evaluation(replace(parts, metrics=()), settings, 0, 1)
    try_evaluation(parts, replace(settings, evaluate=replace(settings.evaluate, sanity_batches=0)), 0, 1)
