"""N workers on a global batch take the same steps as one process on it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from plait.core import events as core_events
from plait.core import run_events
from plait.core.errors import DataError
from plait.data.loader import load, to_device
from plait.data.sampler import Position, batches
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import components
from plait.training.evaluate import evaluate_parts
from support.further import but_further
from support.training import largest_difference, train_here, train_rank, unverified_job
from support.world import run_ranks

JOBS = {
    "sgd": unverified_job(),
    "adamw, accumulated and clipped": unverified_job(
        optimizer=OptimizerSettings("adamw", {"lr": 0.003}), accumulate=3, clip_norm=0.5
    ),
    # 1,442 training samples: the last batch of an epoch has 42.
    "uneven last batches": unverified_job(data=DataSettings("digits", 100), steps=50),
    # The last batch of an epoch has one sample, so two of three workers have none.
    "a last batch smaller than the world": unverified_job(data=DataSettings("digits", 131), steps=14),
    "an unused parameter": unverified_job(model=ModelSettings("support.training:HalfUsed")),
    "a transformer": unverified_job(
        model=ModelSettings("plait.workloads.transformer:transformer_tiny", {"vocabulary": 32}),
        data=DataSettings("synthetic", 12, {"samples": 40, "shape": [8], "vocabulary": 32}),
        optimizer=OptimizerSettings("adam", {"lr": 0.003}),
    ),
}


# The first is in tests/test_engines.py, unused parameters in test_unused_parameters.py; the last batch of the
# third is uneven, that of the fourth more so.
@pytest.mark.parametrize(
    "name", but_further(JOBS, "sgd", "uneven last batches", "an unused parameter", "a transformer")
)
def test_n_workers_give_the_parameters_of_one_process(name: str, tmp_path: Path):
    job, workers = JOBS[name], 2 if name == "sgd" else 3
    one, weights = train_here(job, tmp_path / "one")
    for rank, (result, others) in enumerate(run_ranks(workers, train_rank, job, tmp_path / "many")):
        assert largest_difference(weights, others) < 1e-10
        assert result.train_loss == (pytest.approx(one.train_loss) if rank == 0 else None)
        for metric, value in one.test.items():
            assert result.test[metric] == pytest.approx(value, abs=1e-9)


def clamping_net(classes: int = 10) -> torch.nn.Module:
    """A model with hooks that are not linear in the gradient."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Linear(16, classes))
    model[1].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model[1].bias.register_post_accumulate_grad_hook(_add_decay)
    model[2].register_full_backward_hook(lambda _, into, out: (into[0].clamp(-1e-3, 1e-3),))
    return model


def _add_decay(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(parameter.detach(), alpha=0.1)


def as_under_ddp(rank: int, job: TrainSettings, folder: Path) -> float:
    """How far a run's weights are from those of torch's own data parallelism."""
    _, weights = train_rank(rank, job, folder)
    parts = components.build(job, torch.device("cpu"))
    model = DistributedDataParallel(parts.model)
    order = batches(Position(), len(parts.train_set), 64, seed=job.seed, shuffle=True, keep_last=True)
    steps = itertools.islice(order, job.steps)
    for batch in load(parts.train_set, steps, seed=job.seed, rank=rank, world_size=2, loaders=0):
        inputs, target = to_device(batch.content, parts.device, parts.dtype)
        parts.optimizer.zero_grad()
        parts.loss(model(inputs), target).backward()
        parts.optimizer.step()
    return largest_difference(weights, parts.model.state_dict())


def test_hooks_see_the_gradients_that_they_see_under_ddp(tmp_path: Path):
    job = unverified_job(model=ModelSettings("test_exact:clamping_net"), steps=5)
    assert max(run_ranks(2, as_under_ddp, job, tmp_path)) < 1e-12


def test_one_worker_takes_the_steps_of_a_plain_loop(tmp_path: Path):
    job = unverified_job(steps=30)
    _, weights = train_here(job, tmp_path)
    parts = components.build(job, torch.device("cpu"))
    order = batches(Position(), len(parts.train_set), 64, seed=0, shuffle=True, keep_last=True)
    for _, batch in zip(range(30), order):
        x, y = to_device(parts.train_set.batch(0, batch.samples, 0), parts.device, torch.float64)
        parts.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parts.model(x), y).backward()
        parts.optimizer.step()
    assert largest_difference(weights, parts.model.state_dict()) == 0.0


def test_batch_norm_statistics_are_the_mean_over_the_workers(tmp_path: Path):
    job = unverified_job(model=ModelSettings("support.training:norm_net"), steps=1)
    _, alone = train_here(job, tmp_path / "one")
    (_, first), (_, second) = run_ranks(2, train_rank, job, tmp_path / "two")
    assert largest_difference(first, second) == 0.0
    # Both shares of the first batch have 32 samples, so the mean of their means is the batch's mean.
    assert first["1.running_mean"] == pytest.approx(alone["1.running_mean"].tolist(), rel=1e-12)


def test_random_numbers_differ_between_workers_and_steps_and_repeat_with_the_seed(tmp_path: Path):
    job = unverified_job(model=ModelSettings("support.training:DrawingByRank"), steps=2)
    first, second = run_ranks(2, train_rank, job, tmp_path / "a")[0][1]["by_rank"]
    assert all(a != b for a, b in zip(first, second))
    again, _ = run_ranks(2, train_rank, job, tmp_path / "b")[0][1]["by_rank"]
    assert again == first
    _, earlier = train_here(unverified_job(model=job.model, steps=1), tmp_path / "c")
    assert all(a != b for a, b in zip(first, earlier["drawn"].tolist()))


@pytest.mark.parametrize("precision", but_further(("bf16", "fp16", "float32"), "float32"))
def test_lower_precision_learns_too(precision: str, tmp_path: Path):
    job = unverified_job(precision=precision, steps=60, optimizer=OptimizerSettings("adam", {"lr": 0.003}))
    result, weights = train_here(job, tmp_path)
    assert result.test["accuracy"] > 0.8
    assert all(value.dtype == torch.float32 for value in weights.values())


def test_fp16_trains_on_workers_whose_first_share_is_empty(tmp_path: Path):
    job = unverified_job(
        precision="fp16",
        accumulate=2,
        clip_norm=1.0,
        data=DataSettings("digits", 131),
        steps=11,
        checkpoint=CheckpointSettings(every_steps=11),
    )
    run_ranks(2, train_rank, job, tmp_path)
    # The twelfth batch, the first after the resume, has one sample.
    done = run_ranks(2, train_rank, dataclasses.replace(job, steps=14), tmp_path, True)
    assert largest_difference(done[0][1], done[1][1]) == 0.0
    assert done[0][0].test["loss"] < 2.3


def test_modules_kept_in_evaluation_mode_stay_there():
    job = unverified_job(model=ModelSettings("support.training:norm_net"), steps=2)
    parts = components.build(job, torch.device("cpu"))
    parts.model[1].eval()
    evaluate_parts(parts, job)
    assert [module.training for module in parts.model] == [True, False, True, True, True, True]


def test_steps_that_are_in_no_event_yet_are_recorded_at_the_end(tmp_path: Path):
    result, _ = train_here(unverified_job(steps=7, log_every_steps=5), tmp_path)
    steps = [r.event for r in core_events.read(tmp_path / "events" / "rank0.jsonl")]
    assert [e.step for e in steps if isinstance(e, run_events.Step)] == [5, 7]
    assert result.samples_per_s > 0


class Triples:
    def __init__(self, split: str) -> None:
        pass

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        return torch.zeros(3), torch.zeros(3), torch.tensor(0)


def test_a_data_set_that_gives_no_pairs_is_refused_with_what_is_expected(tmp_path: Path):
    job = unverified_job(data=DataSettings("test_exact:Triples", 4))
    with pytest.raises(DataError, match=r"gave 3 items a sample, expected \(input, target\)"):
        train_here(job, tmp_path)


def test_evaluation_counts_every_test_sample_once_on_any_number_of_workers(tmp_path: Path):
    job = unverified_job(steps=1, evaluate=EvaluateSettings(batch_size=77))
    one, _ = train_here(job, tmp_path / "one")
    four = run_ranks(4, train_rank, job, tmp_path / "four")
    assert [r.test["accuracy"] for r, _ in four] == [one.test["accuracy"]] * 4
