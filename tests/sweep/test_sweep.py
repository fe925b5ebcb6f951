"""A sweep's trials are what `plait train` makes of the same values, whoever sits beside them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from plait.core import events as core_events
from plait.core import run_events
from plait.jobs.evaluate import measure_run
from plait.launcher.run_dir import RunDir
from plait.schema.settings import (
    DataSettings,
    EarlyStopSettings,
    EmaSettings,
    EvaluateSettings,
    LrScheduleSettings,
    ModelSettings,
    OptimizerSettings,
)
from plait.sweeping import array_size
from plait.sweeping.search.space import Dimension
from plait.training import checkpoint as checkpoints
from support.further import but_further
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import digits_job, largest_difference, small_net, unverified_job

SGD = OptimizerSettings("sgd", {"lr": 0.05})
NORM = ModelSettings("support.sweeping:norm_net")


def best_weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = checkpoints.list_checkpoints(RunDir(folder).checkpoints)
    return checkpoints.load(path).model


CASES = {
    "rates, decays and momenta": (
        sweep_of("optimizer.lr=log:1e-3:0.2:2", "optimizer.weight_decay=0,1e-3", "optimizer.momentum=0,0.9")
    ),
    "adam with betas, eps and schedules": sweep_of(
        "optimizer.lr=1e-3,1e-2",
        "optimizer.betas=[0.9,0.999],[0.8,0.9]",
        "lr_schedule.warmup_steps=0,5",
        job=unverified_job(
            steps=20,
            optimizer=OptimizerSettings("adamw", {"eps": 1e-7}),
            lr_schedule=LrScheduleSettings("cosine"),
        ),
    ),
    "steps, clips and smoothing": sweep_of(
        "steps=10,25",
        "clip_norm=null,0.1",
        "loss_args.label_smoothing=0,0.2",
        width=5,
    ),
    "batch sizes and epochs, padded": sweep_of(
        "data.batch_size=32,48,100",
        "seed=0,3",
        job=unverified_job(model=NORM, steps=None, epochs=1, data=DataSettings("digits", 64)),
    ),
    "accumulated microbatches": sweep_of(
        "optimizer.lr=0.01,0.05", "data.batch_size=30,64", job=unverified_job(accumulate=3, steps=8)
    ),
    "shapes and kinds in arrays of their own": sweep_of(
        "model_args.classes=10,12",
        "optimizer.kind=sgd,adamax",
        job=unverified_job(steps=8, optimizer=OptimizerSettings("sgd", {"lr": 0.01})),
    ),
    "optimizers for adapters": sweep_of(
        "optimizer.kind=nadam,lion,adafactor",
        "optimizer.lr=1e-3,3e-3",
        job=unverified_job(
            steps=10, clip_norm=0.5, optimizer=OptimizerSettings("adam", {}, ema=EmaSettings(0.9))
        ),
    ),
    "muon on matrices": sweep_of(
        "optimizer.momentum=0.5,0.95",
        "optimizer.adjust_lr_fn=original,match_rms_adamw",
        job=unverified_job(
            steps=6,
            model=ModelSettings("test_sweep:matrices"),
            optimizer=OptimizerSettings("muon", {"lr": 0.02}),
        ),
    ),
}


def matrices() -> nn.Module:
    """Without biases, which torch's Muon refuses."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16, bias=False), nn.ReLU(), nn.Linear(16, 10, bias=False)
    )


# Microbatches of two workers, steps and clips are in test_sweep_replicas.py, losses with numbers of their own
# below.
# The steps of further optimizers are compared in tests/fusion.
FURTHER = (
    "accumulated microbatches",
    "steps, clips and smoothing",
    "optimizers for adapters",
    "muon on matrices",
)


@pytest.mark.parametrize("name", but_further(CASES, *FURTHER))
def test_each_trial_equals_plait_train_with_its_values(name: str, tmp_path: Path):
    settings = CASES[name]
    found = sweep_here(settings, tmp_path / "sweep")
    assert [row["state"] for row in found["trials"]] == ["finished"] * len(found["trials"])
    for row in found["trials"]:
        alone, weights = trial_alone(settings, row["values"], tmp_path / f"alone-{row['trial']}")
        assert row["step"] == alone.step
        assert row["metrics"] == pytest.approx(alone.test, abs=1e-9)
        if row == found["trials"][0]:
            assert largest_difference(best_weights(tmp_path / "sweep"), weights) < 1e-10
    results = [row["metrics"]["accuracy"] for row in found["trials"]]
    assert results == sorted(results, reverse=True)


def test_a_loss_of_ones_own_has_its_numbers_for_each_trial_over_padded_batches(tmp_path: Path):
    job = unverified_job(loss="torch.nn:CrossEntropyLoss", steps=10)
    over = "loss_args.label_smoothing=0,0.1,0.3", "data.batch_size=20,33"
    settings = sweep_of(*over, job=job, width=6, metric="loss")
    for row in sweep_here(settings, tmp_path / "sweep")["trials"]:
        alone, _ = trial_alone(settings, row["values"], tmp_path / f"alone-{row['trial']}")
        assert row["metrics"] == pytest.approx(alone.test, abs=1e-9)


def test_the_run_folder_of_a_sweep_is_that_of_its_best_trial(tmp_path: Path):
    settings = sweep_of("optimizer.lr=0.001,0.1,0.01")
    found = sweep_here(settings, tmp_path)
    measured = measure_run(RunDir(tmp_path))
    assert found["best"] == found["trials"][0]
    assert measured["step"] == 30
    assert measured["metrics"] == pytest.approx(found["best"]["metrics"], abs=1e-12)
    model = small_net().double()
    model.load_state_dict(load_file(next((tmp_path / "checkpoints").glob("step-*/model.safetensors"))))
    assert not (tmp_path / "trials").exists()


def test_trials_beside_a_diverging_one_are_not_touched_and_it_comes_last(tmp_path: Path):
    settings = sweep_of("optimizer.lr=0.01,1e12,0.05", job=unverified_job(steps=20, optimizer=SGD))
    found = sweep_here(settings, tmp_path / "sweep")
    assert [row["state"] for row in found["trials"]] == ["finished", "finished", "diverged"]
    assert found["trials"][2]["values"] == {"optimizer.lr": 1e12}
    assert found["trials"][2]["step"] < 20
    for row in found["trials"][:2]:
        alone, _ = trial_alone(settings, row["values"], tmp_path / f"alone-{row['trial']}")
        assert row["metrics"] == pytest.approx(alone.test, abs=1e-9)


def test_patience_ends_each_trial_by_itself_as_in_plait_train(tmp_path: Path):
    job = unverified_job(
        steps=40,
        optimizer=SGD,
        evaluate=EvaluateSettings(every_steps=4),
        early_stop=EarlyStopSettings(patience=2, metric="loss", min_change=0.05),
    )
    settings = sweep_of("optimizer.lr=1e-4,0.02,0.3", job=job)
    found = sweep_here(settings, tmp_path / "sweep")
    for row in found["trials"]:
        alone, _ = trial_alone(settings, row["values"], tmp_path / f"alone-{row['trial']}")
        assert (row["step"], row["state"]) == (alone.step, alone.reason)
    assert {row["state"] for row in found["trials"]} == {"finished", "early-stop"}


def test_dropout_draws_the_same_beside_others_as_alone_in_an_array(tmp_path: Path):
    job = unverified_job(steps=10, model=ModelSettings("support.training:small_net", {"dropout": 0.1}))
    pair = sweep_here(sweep_of("model_args.dropout=0.2,0.4", job=job), tmp_path / "pair")
    for row in pair["trials"]:
        dropout = row["values"]["model_args.dropout"]
        one = sweep_here(
            sweep_of(f"model_args.dropout={dropout}", "seed=0,9", job=job), tmp_path / str(dropout)
        )
        same = next(r for r in one["trials"] if r["values"]["seed"] == 0)
        assert same["metrics"] == pytest.approx(row["metrics"], abs=1e-9)


def test_a_narrow_array_is_refilled_and_events_tell_who_sat_together(tmp_path: Path):
    settings = sweep_of("steps=5,10,15", "optimizer.lr=0.01,0.02", width=2)
    sweep_here(settings, tmp_path)
    arrays = [
        recorded.event.trials
        for recorded in core_events.read(RunDir(tmp_path).events())
        if isinstance(recorded.event, run_events.ArrayChanged)
    ]
    assert max(len(array) for array in arrays) == 2
    assert {trial for array in arrays for trial in array} == set(range(6))
    # Trials 0 and 1 end together; 2 and 3 take their places at once.
    assert arrays[:2] == [(0, 1), (2, 3)]


def test_the_width_is_found_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measure = array_size.measure_need

    def measured(*asked):
        need = measure(*asked)
        # In a process of its own, which leaves nothing else behind.
        (tmp_path / "need").write_text(f"{os.getpid()} {need.trial_bytes}")
        return need

    monkeypatch.setattr(array_size, "measure_need", measured)
    found = sweep_here(
        sweep_of("optimizer.lr=log:1e-3:0.1:6", width=None, job=unverified_job(steps=4)), tmp_path
    )
    assert len(found["trials"]) == 6
    # Computed from a step on tensors without memory, not by the upper bound for models that cannot.
    process, bytes_ = (tmp_path / "need").read_text().split()
    assert int(process) != os.getpid()
    assert float(bytes_) > 0


def test_a_model_that_cannot_be_fused_is_told_of_and_trains_one_by_one(tmp_path: Path):
    job = unverified_job(model=ModelSettings("support.training:Counting"), steps=5)
    for width in (4, None, 1):
        settings = sweep_of("optimizer.lr=0.01,0.02", job=job, width=width)
        found = sweep_here(settings, tmp_path / f"width-{width}")
        for row in found["trials"]:
            alone, _ = trial_alone(settings, row["values"], tmp_path / f"alone-{width}-{row['trial']}")
            assert row["metrics"] == alone.test
        assert not found["arrays"][-1]["fused"]
        why = "--width is 1" if width == 1 else "draws from torch's generator"
        assert why in found["arrays"][-1]["why"]


def test_a_module_without_a_fused_form_runs_trial_by_trial_in_an_array(tmp_path: Path):
    # Verification finds the module.
    job = digits_job(model=ModelSettings("support.training:Drawing"), steps=5)
    settings = sweep_of("optimizer.lr=0.01,0.02", job=job, width=4)
    found = sweep_here(settings, tmp_path / "fused")
    assert found["arrays"][-1]["fused"]
    for row in found["trials"]:
        alone, _ = trial_alone(settings, row["values"], tmp_path / f"alone-{row['trial']}")
        assert row["metrics"] == alone.test


def test_half_precision_scales_each_trials_loss_by_itself(tmp_path: Path):
    job = unverified_job(precision="fp16", steps=12, optimizer=SGD)
    settings = sweep_of("optimizer.lr=0.01,0.1", job=job)
    found = sweep_here(settings, tmp_path / "sweep")
    for row in found["trials"]:
        alone, _ = trial_alone(settings, row["values"], tmp_path / f"alone-{row['trial']}")
        assert row["metrics"]["loss"] == pytest.approx(alone.test["loss"], rel=0.02)


@pytest.mark.parametrize("search", but_further(("grid", "halving"), "halving"))
def test_a_trial_whose_weights_are_no_numbers_has_diverged_and_leaves_no_state(search: str, tmp_path: Path):
    """Also where the loss of its last step is a number still."""
    losses = Dimension("loss", ("cross-entropy", "support.training:broken_gradient"))
    job = unverified_job(steps=1 if search == "grid" else 2)
    rule = {"least_steps": 1, "eta": 2} if search == "halving" else {}
    found = sweep_here(sweep_of(losses, job=job, kind=search, **rule), tmp_path)
    assert found["best"]["trial"] == 0
    if search == "halving":  # its state was to be kept
        assert found["trials"][1]["state"] == "diverged"
    assert all(value.isfinite().all() for value in best_weights(tmp_path).values())
    broken = sweep_of("seed=0,1", job=replace(job, loss="support.training:broken_gradient"))
    assert sweep_here(broken, tmp_path / "both")["best"] is None
    assert not checkpoints.list_checkpoints(RunDir(tmp_path / "both").checkpoints)
