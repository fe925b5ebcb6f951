"""Every sync trains: the workers end with the same weights, and some equal what is simple to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.schema.settings import OptimizerSettings, TrainSettings
from support.syncs import run_sync, settings_of
from support.training import digits_job, largest_difference, train_here

PLAIN = OptimizerSettings("sgd", {"lr": 0.05})


# The mean of Adam's updates is not its update by the mean; rounding of zero gradients must not count.
ADAM = OptimizerSettings("adam", {"lr": 0.01, "eps": 1e-3})


def exact(sync: str, options: dict[str, Any], optimizer: OptimizerSettings = PLAIN) -> TrainSettings:
    return settings_of(sync, options, steps=6, precision="float64", optimizer=optimizer)


def one_process(settings: TrainSettings, folder: Path) -> dict[str, Any]:
    return train_here(digits_job(steps=6, data=settings.data, optimizer=settings.optimizer), folder)[1]


@pytest.mark.parametrize(
    ("sync", "options"),
    [
        # Elastic averaging is exact in a simulation of its rounds, and one server is three that share keys.
        pytest.param("sma", {"alpha": 1.0}, marks=pytest.mark.extended),
        ("local-sgd", {"every": 1, "outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0}),
        pytest.param("hetpipe", {"staleness": 0, "servers": 3}, marks=pytest.mark.extended),
        ("hetpipe", {"staleness": 0, "servers": 1, "dedicated": True}),
    ],
)
def test_the_mean_of_all_after_every_step_equals_one_process(
    sync: str, options: dict[str, Any], tmp_path: Path
):
    settings = exact(sync, options)
    found = run_sync(3, settings, tmp_path / "a")
    alone = one_process(settings, tmp_path / "b")
    for _, weights in found:
        assert largest_difference(weights, alone) < 1e-12


def test_gradients_averaged_by_everyone_give_the_optimizer_what_one_process_gives_it(tmp_path: Path):
    everyone = {"average": "gradients", "minimum": 3, "patience": 1000.0, "every": 1}
    settings = exact("partial-reduce", everyone, ADAM)
    found = run_sync(3, settings, tmp_path / "a")
    alone = one_process(settings, tmp_path / "b")
    for _, weights in found:
        assert largest_difference(weights, alone) < 1e-12
    by_weights = exact("partial-reduce", {**everyone, "average": "weights"}, ADAM)
    assert largest_difference(run_sync(3, by_weights, tmp_path / "c")[0][1], alone) > 1e-6


@pytest.mark.parametrize(
    ("sync", "options"),
    [
        ("ad-psgd", {"graph": "ring"}),
        # AD-PSGD averages in pairs, too.
        pytest.param("pair-sync", {}, marks=pytest.mark.extended),
        pytest.param("pair-averaging", {}, marks=pytest.mark.extended),
        # An outer optimizer is compared with one process above, and in test_sync_resume.py.
        pytest.param("local-sgd", {"every": 4, "outer": "nesterov"}, marks=pytest.mark.extended),
        ("hetpipe", {"staleness": 2, "wave": 2, "servers": 2}),
    ],
)
def test_every_sync_learns_and_all_workers_end_with_the_same_weights(
    sync: str, options: dict[str, Any], tmp_path: Path
):
    found = run_sync(4, settings_of(sync, options, steps=60), tmp_path)
    assert found[0][0].test["accuracy"] > 0.75
    for _, weights in found[1:]:
        assert largest_difference(weights, found[0][1]) < 1e-6
