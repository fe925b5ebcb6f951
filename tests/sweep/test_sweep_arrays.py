"""Which trials share an array, what the sweep says of it, and models that fusion cannot take as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core import events as core_events
from plait.core import run_events
from plait.fusion import fuse
from plait.launcher.run_dir import RunDir
from plait.schema.settings import (
    UNVERIFIED,
    CheckpointSettings,
    EarlyStopSettings,
    EvaluateSettings,
    GroupSettings,
    LrScheduleSettings,
    ModelSettings,
    OptimizerSettings,
)
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trials import assigned_trials
from plait.sweeping.trials.running_trial import RunningTrial
from plait.sweeping.trials.trial_files import save_trial
from plait.training.checkpoint import EngineState
from support.further import but_further
from support.sweeping import same_table, sweep_here, sweep_of, trial_alone
from support.training import digits_job


def job_of(model: str, steps: int = 8, **changes: Any) -> Any:
    return digits_job(steps=steps, model=ModelSettings(f"support.sweeping:{model}"), **changes)


def arrays_in(folder: Path) -> list[run_events.ArrayChanged]:
    found = [recorded.event for recorded in core_events.read(RunDir(folder).events())]
    return [event for event in found if isinstance(event, run_events.ArrayChanged) and event.trials]


def together(found: dict[str, Any]) -> list[tuple[list[int], bool]]:
    return sorted((array["trials"], array["fused"]) for array in found["arrays"])


def assert_as_alone(settings: SweepSettings, found: dict[str, Any], folder: Path) -> None:
    for row in found["trials"]:
        alone, _ = trial_alone(settings, row["values"], folder / f"alone-{row['trial']}")
        assert row["step"] == alone.step
        assert row["metrics"] == pytest.approx(alone.test, abs=1e-9), row["values"]


def test_a_base_that_every_trial_loads_is_held_once_by_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []

    def fuse_and_look(*args: Any, **kwargs: Any) -> Any:
        fused = fuse(*args, **kwargs)
        seen.append(fused)
        return fused

    monkeypatch.setattr("plait.training.fused.fused_components.fuse", fuse_and_look)
    settings = sweep_of(
        "optimizer.lr=0.1,0.03,0.01,0.2,0.5,0.05",
        width=3,
        job=job_of("OnFrozenBase"),
        kind="asha",
        eta=2,
        least_steps=2,
    )
    found = sweep_here(settings, tmp_path)
    finished = [row for row in found["trials"] if row["step"] == 8]
    assert len(finished) < len(found["trials"])
    assert_as_alone(settings, {"trials": finished}, tmp_path)
    assert set(seen[-1].shared) == {"base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"}


def test_a_search_that_learns_fuses_where_no_width_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # As many as pay depends on the machine; here, all that may be.
    monkeypatch.setattr(
        "plait.sweeping.array_builder.choose_width", lambda fresh, asked, sets: (asked.trials, "")
    )
    job = digits_job(steps=9)
    settings = sweep_of("optimizer.lr=log:1e-3:0.3", width=None, job=job, kind="asha", trials=12)
    sweep_here(settings, tmp_path)
    first = arrays_in(tmp_path)[0]
    assert first.fused
    # As many as are drawn at random anyway; the others learn from their results.
    assert first.trials == tuple(range(10))


def test_trials_that_differ_in_a_tuple_have_an_array_for_each_kind(tmp_path: Path):
    settings = sweep_of("model_args.dilation=1,2", "optimizer.lr=0.05,0.1", job=job_of("Dilated"))
    found = sweep_here(settings, tmp_path / "sweep")
    assert_as_alone(settings, found, tmp_path)
    assert together(found) == [([0, 1], True), ([2, 3], True)]


def test_trials_whose_models_turn_out_to_differ_are_split_and_it_says_why(tmp_path: Path):
    settings = sweep_of("model_args.share=0.4,1.0", "optimizer.lr=0.05,0.1", job=job_of("Configured"))
    found = sweep_here(settings, tmp_path / "sweep")
    assert_as_alone(settings, found, tmp_path)
    assert together(found) == [([0, 1], True), ([2, 3], True)]


def test_trials_that_count_in_python_join_others_of_another_age(tmp_path: Path):
    settings = sweep_of("steps=6,9,7", "optimizer.lr=0.02,0.1", width=4, job=job_of("Counting"))
    found = sweep_here(settings, tmp_path / "sweep")
    assert_as_alone(settings, found, tmp_path)
    assert together(found) == [([0, 1, 2, 3, 4, 5], True)]


def test_a_model_that_keeps_tensors_in_lists_and_dictionaries_is_swept(tmp_path: Path):
    job = job_of("Keeping", evaluate=EvaluateSettings(every_steps=3), checkpoint=CheckpointSettings(4))
    settings = sweep_of("steps=5,8", "optimizer.lr=0.02,0.1", width=4, job=job)
    found = sweep_here(settings, tmp_path / "sweep")
    assert all(array["fused"] for array in found["arrays"])
    assert_as_alone(settings, found, tmp_path)


def test_an_operation_that_is_refused_in_mid_training_separates_the_trials(tmp_path: Path):
    settings = sweep_of("optimizer.lr=0.02,0.1", job=job_of("Branching", verify=UNVERIFIED))
    found = sweep_here(settings, tmp_path / "sweep")
    assert_as_alone(settings, found, tmp_path)
    fused, *alone = arrays_in(tmp_path / "sweep")
    assert fused.fused
    assert [event.trials for event in alone] == [(0,), (1,)]
    for event in alone:
        assert not event.fused
        assert "if self.calls > 3 and y.sum().item() > 0" in event.why
    assert together(found) == [([0, 1], False), ([0, 1], True)]


def test_groups_of_parameters_train_fused_also_where_trials_join_and_leave(tmp_path: Path):
    no_decay = GroupSettings("*.bias", {"weight_decay": 0.0, "lr": 0.02})
    adamw = OptimizerSettings("adamw", {"lr": 0.01, "weight_decay": 0.3}, (no_decay,))
    schedule = LrScheduleSettings("polynomial", 2)
    job = digits_job(steps=9, optimizer=adamw, lr_schedule=schedule, clip_norm=0.5)
    settings = sweep_of("optimizer.lr=0.01,0.05", "steps=5,9,7", width=2, job=job)
    found = sweep_here(settings, tmp_path / "sweep")
    assert together(found) == [([0, 1, 2, 3, 4, 5], True)]
    assert_as_alone(settings, found, tmp_path)


def test_each_array_of_one_trial_says_why_it_is_one(tmp_path: Path):
    sgd = OptimizerSettings("sgd", {"lr": 0.01})
    cases = {
        "optimizer.kind 'adamax' has no fused form": sweep_of(
            "optimizer.kind=adamax", job=digits_job(steps=1, optimizer=sgd)
        ),
        "--width is 1": sweep_of("optimizer.lr=0.1,0.2", job=digits_job(steps=1), width=1),
        "the sweep has one trial": sweep_of("optimizer.lr=0.1", job=digits_job(steps=1)),
        "what keeps them apart: model_args.classes": sweep_of(
            "model_args.classes=10,12", job=digits_job(steps=1)
        ),
    }
    for number, (words, settings) in enumerate(cases.items()):
        arrays = sweep_here(settings, tmp_path / str(number))["arrays"]
        assert [trial for array in arrays for trial in array["trials"]] == [
            *range(len(settings.over[0].values))
        ]
        for array in [*arrays, *(vars(event) for event in arrays_in(tmp_path / str(number)))]:
            assert not array["fused"]
            assert words in array["why"]


EARLY = job_of(
    "norm_net",
    steps=20,
    evaluate=EvaluateSettings(every_steps=4),
    early_stop=EarlyStopSettings(patience=1, min_change=1e9),
)


def test_a_kill_between_an_early_stopped_trials_checkpoint_and_its_record_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Killed(BaseException):
        """Nothing after it runs."""

    settings = sweep_of("optimizer.lr=0.01,0.1", width=2, job=EARLY)
    expected = sweep_here(settings, tmp_path / "whole")
    assert {(row["state"], row["step"]) for row in expected["trials"]} == {("early-stop", 8)}

    def save_and_die(*args: Any) -> None:
        save_trial(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(assigned_trials, "save_trial", save_and_die)
        with pytest.raises(Killed):
            sweep_here(settings, tmp_path / "killed")
    assert same_table(expected, sweep_here(settings, tmp_path / "killed", resume=True))


# Rungs are the same for all searches.
@pytest.mark.parametrize("kind", but_further(("pbt", "asha", "halving"), "pbt", "asha"))
def test_patience_counts_evaluations_at_rungs_too(kind: str, tmp_path: Path):
    settings = sweep_of("optimizer.lr=0.05,0.1", width=2, job=EARLY, kind=kind, least_steps=4, eta=2)
    found = sweep_here(settings, tmp_path)
    assert found["trials"][0]["state"] == "early-stop"
    assert max(row["step"] for row in found["trials"]) == 8


def test_checkpoints_are_written_at_rungs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = []

    def noted(folder: RunDir, trial: RunningTrial, state: EngineState) -> bool:
        saved.append((trial.number, trial.step))
        return save_trial(folder, trial, state)

    monkeypatch.setattr(assigned_trials, "save_trial", noted)
    job = job_of("norm_net", steps=12, checkpoint=CheckpointSettings(every_steps=6))
    sweep_here(sweep_of("optimizer.lr=0.1", width=2, job=job, kind="asha", least_steps=6), tmp_path)
    assert saved == [(0, 6), (0, 12)]


def test_a_trial_whose_loss_is_lost_after_its_last_point_has_diverged(tmp_path: Path):
    job = digits_job(steps=7, log_every_steps=100, optimizer=OptimizerSettings("sgd", {"lr": 0.1}))
    settings = sweep_of("optimizer.lr=1e200,0.1", job=job)
    found = sweep_here(settings, tmp_path)
    states = {row["values"]["optimizer.lr"]: row["state"] for row in found["trials"]}
    assert states == {1e200: "diverged", 0.1: "finished"}
    # Steps without a point count, too.
    assert found["trial_steps_per_s"] == pytest.approx(14 / found["seconds"], rel=0.02)
