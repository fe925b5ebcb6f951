"""A sweep's trials are what `plait train` makes of the same values, whoever sits beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.runtime import checkpoint as checkpoints
from plait.runtime.folder import RunFolder
from plait.runtime.settings import (
    DataSettings,
    LrScheduleSettings,
    ModelSettings,
    OptimizerSettings,
)
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import digits_job, largest_difference

NORM = ModelSettings("support.sweeping:norm_net")


def best_weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = checkpoints.list_checkpoints(RunFolder(folder).checkpoints)
    return checkpoints.load(path).model


CASES = {
    "rates, decays and momenta": (
        sweep_of("optimizer.lr=log:1e-3:0.2:3", "optimizer.weight_decay=0,1e-3", "optimizer.momentum=0,0.9")
    ),
    "adam with betas, eps and schedules": sweep_of(
        "optimizer.lr=1e-3,1e-2",
        "optimizer.betas=[0.9,0.999],[0.8,0.9]",
        "lr_schedule.warmup_steps=0,5",
        job=digits_job(
            steps=20,
            optimizer=OptimizerSettings("adamw", {"eps": 1e-7}),
            lr_schedule=LrScheduleSettings("cosine"),
        ),
    ),
    "seeds, steps, clips and smoothing": sweep_of(
        "seed=0,1",
        "steps=10,25",
        "clip_norm=null,0.1",
        "loss_args.label_smoothing=0.05,0.2",
        width=5,
    ),
    "batch sizes and epochs, padded": sweep_of(
        "data.batch_size=32,48,100",
        "seed=0,3",
        job=digits_job(model=NORM, steps=None, epochs=1, data=DataSettings("digits", 64)),
    ),
    "accumulated microbatches": sweep_of(
        "optimizer.lr=0.01,0.05", "data.batch_size=30,64", job=digits_job(accumulate=3, steps=8)
    ),
    "shapes and kinds in arrays of their own": sweep_of(
        "model_args.classes=10,12",
        "optimizer.kind=sgd,adamax",
        job=digits_job(steps=8, optimizer=OptimizerSettings("sgd", {"lr": 0.01})),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_trial_equals_plait_train_with_its_values(name: str, tmp_path: Path):
    settings = CASES[name]
    found = sweep_here(settings, tmp_path / "sweep")
    assert [row["state"] for row in found["trials"]] == ["finished"] * len(found["trials"])
    for row in found["trials"]:
        alone, weights = trial_alone(settings, row["values"], tmp_path / f"alone-{row['trial']}")
        assert row["step"] == alone["step"]
        assert row["metrics"] == pytest.approx(alone["test"], abs=1e-9)
        if row == found["trials"][0]:
            assert largest_difference(best_weights(tmp_path / "sweep"), weights) < 1e-10
    results = [row["metrics"]["accuracy"] for row in found["trials"]]
    assert results == sorted(results, reverse=True)
