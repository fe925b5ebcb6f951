"""N workers on a global batch take the same steps as one process on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.runtime import build
from plait.runtime.loading import to_device
from plait.runtime.sampling import Position, batches
from plait.runtime.settings import DataSettings, EvaluateSettings, ModelSettings, OptimizerSettings
from support.training import digits_job, largest_difference, train_here, train_rank
from support.world import run_ranks

JOBS = {
    "sgd": digits_job(),
    "adamw, accumulated and clipped": digits_job(
        optimizer=OptimizerSettings("adamw", {"lr": 0.003}), accumulate=3, clip_norm=0.5
    ),
    # 1,442 training samples: the last batch of an epoch has 42.
    "uneven last batches": digits_job(data=DataSettings("digits", 100), steps=50),
    # The last batch of an epoch has one sample, so two of three workers have none.
    "a last batch smaller than the world": digits_job(data=DataSettings("digits", 131), steps=14),
    "an unused parameter": digits_job(model=ModelSettings("support.training:HalfUsed")),
    "a transformer": digits_job(
        model=ModelSettings("plait.workloads.transformer:transformer_tiny", {"vocabulary": 32}),
        data=DataSettings("synthetic", 12, {"samples": 40, "shape": [8], "vocabulary": 32}),
        optimizer=OptimizerSettings("adam", {"lr": 0.003}),
    ),
}


@pytest.mark.parametrize(("name", "workers"), [*((n, 3) for n in JOBS), ("sgd", 2)])
def test_n_workers_give_the_parameters_of_one_process(name: str, workers: int, tmp_path: Path):
    job = JOBS[name]
    one, weights = train_here(job, tmp_path / "one")
    for result, others in run_ranks(workers, train_rank, job, tmp_path / "many"):
        assert largest_difference(weights, others) < 1e-10
        assert result["train_loss"] in (None, pytest.approx(one["train_loss"]))
        for metric, value in one["test"].items():
            assert result["test"][metric] == pytest.approx(value, abs=1e-9)


def test_one_worker_takes_the_steps_of_a_plain_loop(tmp_path: Path):
    job = digits_job(steps=30)
    _, weights = train_here(job, tmp_path)
    parts = build.build(job, torch.device("cpu"))
    order = batches(Position(), len(parts.train_set), 64, seed=0, shuffle=True, keep_last=True)
    for _, batch in zip(range(30), order):
        x, y = to_device(parts.train_set.__getitems__(list(batch.samples)), parts.device, torch.float64)
        parts.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parts.model(x), y).backward()
        parts.optimizer.step()
    assert largest_difference(weights, parts.model.state_dict()) == 0.0


def test_batch_norm_statistics_are_the_mean_over_the_workers(tmp_path: Path):
    job = digits_job(model=ModelSettings("support.training:norm_net"), steps=1)
    _, alone = train_here(job, tmp_path / "one")
    (_, first), (_, second) = run_ranks(2, train_rank, job, tmp_path / "two")
    assert largest_difference(first, second) == 0.0
    # Both shares of the first batch have 32 samples, so the mean of their means is the batch's mean.
    assert first["1.running_mean"] == pytest.approx(alone["1.running_mean"].tolist(), rel=1e-12)


def test_dropout_differs_between_workers_and_repeats_with_the_seed(tmp_path: Path):
    job = digits_job(model=ModelSettings("support.training:small_net", {"dropout": 0.5}), steps=5)
    once = run_ranks(2, train_rank, job, tmp_path / "a")
    again = run_ranks(2, train_rank, job, tmp_path / "b")
    assert largest_difference(once[0][1], again[0][1]) == 0.0
    _, alone = train_here(job, tmp_path / "c")
    assert largest_difference(once[0][1], alone) > 0.0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "float32"])
def test_lower_precision_learns_too(precision: str, tmp_path: Path):
    job = digits_job(precision=precision, steps=60, optimizer=OptimizerSettings("adam", {"lr": 0.003}))
    result, weights = train_here(job, tmp_path)
    assert result["test"]["accuracy"] > 0.8
    assert all(value.dtype == torch.float32 for value in weights.values())


def test_evaluation_counts_every_test_sample_once_on_any_number_of_workers(tmp_path: Path):
    job = digits_job(steps=1, evaluate=EvaluateSettings(batch_size=77))
    one, _ = train_here(job, tmp_path / "one")
    four = run_ranks(4, train_rank, job, tmp_path / "four")
    assert [r["test"]["accuracy"] for r, _ in four] == [one["test"]["accuracy"]] * 4
